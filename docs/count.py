"""What a training step of the quickstart's model sends and keeps, counted, beside the formula.

    python -m docs.count data_parallel        (or tensor_parallel, pipeline_parallel, context_parallel)

The step is the one that train.py takes. It runs in torch's fake process group, in which a message is done at once and
changes nothing: so one process can be any rank of any layout. What it computes is nonsense there, but not how much of it
is sent and kept. The formulas' letters: B sequences in a micro-batch, T tokens in each, D hidden size, L layers, P
parameters; all numbers are float32, 4 bytes.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.context_parallel import LiveBytes, attention_work
from benchmarks.tensor_parallel import kept_by
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket, DataParallelNaive
from picotron.model import load_model_config
from picotron.optimizer import AdamW
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, hidden_states_shape
from picotron.pipeline_parallel.plan import training_schedule
from picotron.pipeline_parallel.schedules import SCHEDULES, build
from picotron.pipeline_parallel.simulate import Costs, peak_activations, simulate
from picotron.process_group_manager import setup_process_group_manager
from train import build_model, pick_train_step

CPU = torch.device("cpu")
MIB = 2**20
# What a rank sends of a whole tensor in a ring of n ranks. (An all-reduce is a reduce-scatter and an all-gather.)
SHARE: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "send": lambda n: 1,
}
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
}


class Traffic(TorchDispatchMode):
    """Counts what this rank sends while the mode is on: messages, and their bytes, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, float] = defaultdict(float)

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(function.overloadpacket.__name__) if function.namespace == "c10d" else None
        if kind is not None:
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            whole = max(tensor.nbytes for tensor in tree_leaves(args[:2]) if isinstance(tensor, Tensor))
            self.messages[kind] += 1
            self.bytes[kind] += SHARE[kind](group.size()) * whole
        return function(*args, **(kwargs or {}))


def quickstart(**changes: Any) -> Config:
    """template/base_config.json on one process, but for what is changed: `tp_size=2`, `gradient_accumulation_steps=1`."""
    alone = {"dp_size": 1, "pp_size": 1, "tp_size": 1}
    training = {"gradient_accumulation_steps", "activation_checkpointing", "seq_length"}
    arguments = ["--config", "template/base_config.json"]
    for key, value in (alone | changes).items():
        arguments += [f"--{'training' if key in training else 'distributed'}.{key}", str(value).lower()]
    return load_config(arguments)


@contextmanager
def fake_rank(rank: int, config: Config) -> Iterator[None]:
    """Be this rank of a layout."""
    layout = config.distributed
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
        yield
    finally:
        dist.destroy_process_group()


def stage_of(config: Config) -> PipelineParallel:
    return build_model(config, load_model_config(config.model), CPU, torch.float32)


def step_of(config: Config, wrap: Callable[..., DataParallel] = DataParallelBucket) -> Callable[[], Any]:
    """What this rank does in a step, ready to be called."""
    stage = stage_of(config)
    model = wrap(stage, groups=stage.parameters_by_stage())
    tokens = np.zeros(config.training.seq_length * config.global_batch_size + 1, np.uint16)
    loader = MicroBatchDataLoader(tokens, config, CPU)
    shape = hidden_states_shape(config, load_model_config(config.model))
    take_step = pick_train_step(config, shape, CPU, torch.float32)
    return lambda: take_step(model, loader)


def traffic_of(config: Config, rank: int = 0, wrap: Callable[..., DataParallel] = DataParallelBucket) -> Traffic:
    """What a rank sends in a step, without the few numbers of logging and clipping."""
    with fake_rank(rank, config):
        step = step_of(config, wrap)
        with Traffic() as traffic:
            step()
    return traffic


def parameters() -> int:
    with fake_rank(0, quickstart()):
        return sum(p.numel() for p in stage_of(quickstart()).parameters())


def hidden_bytes(config: Config) -> int:
    """B T D numbers: the hidden states of a micro-batch."""
    training = config.training
    return training.micro_batch_size * training.seq_length * load_model_config(config.model).hidden_size * 4


def table(*rows: tuple[Any, ...]) -> None:
    """Print aligned columns, the first one to the left; the first row are their names."""
    cells = [[f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)), sep="  ")
    print()


# ------------------------------------------------------------------------------------------------- one for each page


def data_parallel() -> None:
    P = parameters()
    print(f"P = {P:,} parameters. What a rank sends in a step, MiB; formula: 2 (dp - 1)/dp 4 P\n")
    wrappers: dict[str, Callable[..., DataParallel]] = {
        "naive": DataParallelNaive,
        "buckets of 25 MB": DataParallelBucket,
        "buckets of 4 MB": lambda *args, **options: DataParallelBucket(*args, bucket_mb=4, **options),
    }
    rows: list[tuple[Any, ...]] = [("", "micro-batches", "messages", "counted", "formula")]
    for dp, name, micro_batches in [
        *((2, name, 1) for name in wrappers),
        (2, "buckets of 4 MB", 4),
        (4, "buckets of 4 MB", 1),
        (8, "buckets of 4 MB", 1),
    ]:
        config = quickstart(dp_size=dp, gradient_accumulation_steps=micro_batches)
        traffic = traffic_of(config, wrap=wrappers[name])
        messages, counted = traffic.messages["all-reduce"], traffic.total / MIB
        rows.append((f"dp {dp}, {name}", micro_batches, messages, counted, 2 * (dp - 1) / dp * 4 * P / MIB))
    table(*rows)

    print("What a rank keeps for each parameter, bytes, in any number of data-parallel ranks\n")
    rows = [("", "weight", "main_grad", "optimizer", "counted", "formula")]
    for dtype, formula in ((torch.float32, "4 + 4 + 8"), (torch.bfloat16, "2 + 4 + 4 + 8")):
        config = quickstart()
        with fake_rank(0, config):
            model = DataParallelBucket(stage_of(config).to(dtype))
            optimizer = AdamW(model.parameters(), config.training, fused=False)
            optimizer.step()
        weights = sum(p.nbytes for p in model.parameters())
        gradients = sum(bucket.buffer.nbytes for bucket in model.buckets)
        states = sum(t.nbytes for p in model.parameters() for t in optimizer.state_of(p).values())
        each = [float(n / P) for n in (weights, gradients, states, weights + gradients + states)]
        rows.append((str(dtype).removeprefix("torch."), *each, formula))
    table(*rows)


def tensor_parallel() -> None:
    layouts = [(1, False), (2, False), (2, True), (4, False), (4, True)]
    config = quickstart(gradient_accumulation_steps=1)
    model, unit_of_one = load_model_config(config.model), hidden_bytes(config)
    L, D = model.num_hidden_layers, model.hidden_size
    print("What a rank sends for a micro-batch, MiB. A unit is (tp - 1)/tp B T D numbers. A layer sends 8 units, with")
    print("sequence parallelism 10; embedding and head 4; the loss 6/D.\n")
    rows: list[tuple[Any, ...]] = [("", "unit", "units", "formula", "counted", "all-reduce", "all-gather", "r.-scatter")]
    for tp, sp in layouts:
        changed = quickstart(tp_size=tp, sequence_parallel=sp, gradient_accumulation_steps=1)
        traffic, unit = traffic_of(changed), (tp - 1) / tp * unit_of_one / MIB
        units = L * (10 if sp else 8) + 4 + 6 / D
        kinds = (traffic.messages[kind] for kind in ("all-reduce", "all-gather", "reduce-scatter"))
        rows.append((_name(tp, sp), unit, units, units * unit, traffic.total / MIB, *kinds))
    table(*rows)

    print("What a rank holds, MiB: its parameters, and what a layer's forward keeps for its backward. The norms keep")
    print("s = 6 B T D numbers, the blocks p = B T (2 H d + 2 K d + 4 F).\n")
    heads, kv_heads = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    BT = config.training.micro_batch_size * config.training.seq_length
    s, p = 6 * BT * D * 4 / MIB, BT * (2 * heads + 2 * kv_heads + 4 * model.intermediate_size) * 4 / MIB
    rows = [("", "parameters", "kept, counted", "kept, formula", "")]
    for tp, sp in layouts:
        changed = quickstart(tp_size=tp, sequence_parallel=sp)
        with fake_rank(0, changed):
            stage = stage_of(changed)
            held = sum(parameter.nbytes for parameter in stage.parameters()) / MIB
            shape = (config.training.micro_batch_size, config.training.seq_length // (tp if sp else 1), D)
            kept = kept_by(stage.module.model.layers["0"], shape, config.training.seq_length) / MIB
        formula, text = ((s + p) / tp, "(s + p)/tp") if sp else (s + p / tp, "s + p/tp")
        rows.append((_name(tp, sp), held, kept, formula, text))
    table(*rows)


def _name(tp: int, sequence_parallel: bool) -> str:
    return f"tp {tp}" + (", sequence parallel" if sequence_parallel else "")


def pipeline_parallel() -> None:
    m = 4
    config = quickstart(gradient_accumulation_steps=m)
    model = load_model_config(config.model)
    message, matrix = hidden_bytes(config) / MIB, model.vocab_size * model.hidden_size * 4 / MIB
    print(f"What each rank sends in a step of m = {m} micro-batches, MiB: B T D numbers ({message:.2f} MiB) for each")
    print("micro-batch and each neighbour that a stage of it has on another rank. If the first and the last stage are on")
    print(f"two ranks, they also sum the gradient of the tied embedding ({matrix:.2f} MiB).\n")
    rows: list[tuple[Any, ...]] = [("", "rank", "sends", "activations", "tied", "counted", "formula")]
    for engine, pp in (("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2)):
        changed = quickstart(pp_size=pp, pp_engine=engine, gradient_accumulation_steps=m)
        schedule = training_schedule(changed)
        for rank in range(pp):
            traffic = traffic_of(changed, rank)
            stages = schedule.stages_of(rank)
            around = [other for stage in stages for other in (stage - 1, stage + 1)]
            away = sum(0 <= n < schedule.num_stages and schedule.rank_of(n) != rank for n in around)
            ends = {schedule.rank_of(0), schedule.rank_of(schedule.num_stages - 1)}
            tied = matrix if len(ends) == 2 and rank in ends else 0.0
            counted = (traffic.bytes["send"] / MIB, traffic.bytes["all-reduce"] / MIB, traffic.total / MIB)
            rows.append((f"{engine}, pp {pp}", rank, traffic.messages["send"], *counted, m * away * message + tied))
    table(*rows)

    print("The most that rank 0 of 4 has in memory during a step, MiB, without weights and gradients; and the micro-batches")
    print("whose activations wait for their backward then: m in AFAB, min(m, p) in 1F1B.\n")
    rows = [("micro-batches", "AFAB", "waiting", "1F1B", "waiting")]
    for m in (1, 2, 4, 8):
        row: list[Any] = [m]
        for engine in ("afab", "1f1b"):
            row += [_peak(engine, 4, m) / MIB, peak_activations(build(engine, 4, m).programs[0])]
        rows.append(tuple(row))
    table(*rows)

    print("The bubble, simulated, with B twice as long as F; beside (p - 1)/(m + p - 1)\n")
    rows = [("", "p 4, m 4", "p 4, m 8", "p 4, m 32", "p 8, m 32")]
    rows.append(("(p - 1)/(m + p - 1)", *(f"{(p - 1) / (m + p - 1):.1%}" for p, m in BUBBLES)))
    for engine in SCHEDULES:
        rows.append((engine, *(f"{_bubble(engine, p, m):.1%}" for p, m in BUBBLES)))
    table(*rows)


BUBBLES = ((4, 4), (4, 8), (4, 32), (8, 32))


def _bubble(engine: str, pp: int, microbatches: int) -> float:
    schedule = build(engine, pp, microbatches)
    return simulate(schedule, Costs(weights=[1 / schedule.chunks] * schedule.num_stages)).bubble


def _peak(engine: str, pp: int, microbatches: int) -> int:
    config = quickstart(pp_size=pp, pp_engine=engine, gradient_accumulation_steps=microbatches)
    with fake_rank(0, config):
        step = step_of(config)
        with LiveBytes(not_counted=[]) as live:
            step()
    return live.peak


def context_parallel() -> None:
    config = quickstart(gradient_accumulation_steps=1)
    model, training, P = load_model_config(config.model), config.training, parameters()
    L, BT = model.num_hidden_layers, training.micro_batch_size * training.seq_length
    q = BT * model.num_attention_heads * model.head_dim * 4 / MIB
    kv = 2 * BT * model.num_key_value_heads * model.head_dim * 4 / MIB
    print(f"What a rank sends for a micro-batch, MiB. In a layer, all queries are q = {q:.2f} MiB, keys and values together")
    print(f"kv = {kv:.2f}. Beside that, 2 (cp - 1)/cp 4 P to average the gradients of the weights.\n")
    formulas: dict[str, tuple[str, Callable[[int], float]]] = {
        "ring": ("(3 cp - 2)/cp kv", lambda cp: (3 * cp - 2) / cp * kv),
        "all_gather": ("3 (cp - 1)/cp kv", lambda cp: 3 * (cp - 1) / cp * kv),
        "ulysses": ("2 (cp - 1)/cp (2 q + kv)/cp", lambda cp: 2 * (cp - 1) / cp * (2 * q + kv) / cp),
    }
    rows: list[tuple[Any, ...]] = [("", "a layer", "formula", "", "weights' gradients", "formula ")]
    for cp in (2, 4):
        for engine, (text, formula) in formulas.items():
            changed = quickstart(cp_size=cp, cp_engine=engine, gradient_accumulation_steps=1)
            traffic = traffic_of(changed)
            reduced = traffic.bytes["all-reduce"]
            counted = ((traffic.total - reduced) / L / MIB, formula(cp), text, reduced / MIB)
            rows.append((f"cp {cp}, {engine}", *counted, 2 * (cp - 1) / cp * 4 * P / MIB))
    table(*rows)

    print("The busiest rank's attention work over the mean, in query-key pairs; and what a layer's forward keeps for its")
    print("backward on each rank, MiB\n")
    rows = [("", "zigzag", "contiguous", "(2 cp - 1)/cp", "kept", "1/cp of it all")]
    whole = 0.0
    for cp in (1, 2, 4, 8):
        changed = quickstart(cp_size=cp)
        with fake_rank(0, changed):
            length = training.seq_length // cp
            layer = stage_of(changed).module.model.layers["0"]
            kept = kept_by(layer, (training.micro_batch_size, length, model.hidden_size), length) / MIB
        whole = whole or kept
        work = [attention_work(cp, sharding) for sharding in ("zigzag", "contiguous")]
        rows.append((f"cp {cp}", *work, (2 * cp - 1) / cp, kept, whole / cp))
    table(*rows)


PAGES = (data_parallel, tensor_parallel, pipeline_parallel, context_parallel)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=[page.__name__ for page in PAGES])
    globals()[parser.parse_args().page]()
