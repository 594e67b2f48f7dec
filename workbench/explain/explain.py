"""Explain a layout of any size on one process: what each rank holds, every message of a training step, and its time.

    python train.py --config template/base_config.json --explain
    python train.py --config template/base_config.json --explain --hardware H100 --gib 80

There is no second description of a step here. The step of train.py runs in a fake process group, which has any number
of ranks but only one process, with tensors on the meta device, which have shapes but no memory. For each pp rank
that differs from others, the process plays the rank with dp, cp and tp rank 0; the others with this pp rank hold and
send the same amounts. (With ZeRO, the last slices of a buffer may have padding.)

Only what does not happen on the meta device follows from formulas: activations (`rank_memory`) and times (`forecast`).
A router cannot choose there either: `route_evenly` gives all experts of a layer the same number of tokens.

The step includes clipping, the optimizer, the reductions of its metrics and the check for stop signals. It does not
include the other messages of a run: evaluations, checkpoints, the load of experts, and on CPUs ZeRO-3's check for NaN.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader, TextRows
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model import cross_entropy
from picotron.model.families import Differences, differences, part_parameters
from picotron.model.placement import Index
from picotron.optimizer import update_weights
from picotron.parallelize import unwrap
from picotron.pipeline_parallel.stages import Stage
from workbench.console import print_line, text_table
from workbench.explain.fake_group import FakeGroup, Message, fake_rank
from workbench.explain.forecast_errors import describe_errors
from workbench.explain.hardware import Hardware, fits, usable
from workbench.explain.measure import find_hardware, on_hardware
from workbench.explain.step_time import Forecast, forecast
from workbench.pipelines.engine import ExecutorPlan, check_layout, make_train_step
from workbench.pipelines.memory import GIB, Memory, bubble, count_parameters, rank_memory
from workbench.run.metrics import global_mean, max_over_ranks
from workbench.run.model_config import load_model_config
from workbench.run.with_keys import with_keys
from workbench.schedules.schedules import SCHEDULES, build
from workbench.variants.choose import build_model, make_optimizer
from workbench.variants.experts import Experts
from workbench.variants.zero3 import DataParallelZero3

META = torch.device("meta")


class Step(NamedTuple):
    """Amounts that a rank holds between steps, and its messages in a step."""

    layers: int
    parameters: int
    weights: int  # bytes, as the next two
    gradients: int
    optimizer: int
    messages: Counter[Message]


def bytes_held(model: DataParallel) -> tuple[int, int]:
    """Return the bytes of the weights and of the gradients that a rank holds between steps."""
    if isinstance(model, DataParallelZero3):
        weights = sum(unit.shard.nbytes for unit in model.units)
    else:
        weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights, sum(buffer.nbytes for buffer in model.gradient_buffers())


def run_step(model: DataParallel, data_loader: Any, config: Config, train_step: Callable[[Any, Any], Tensor]) -> Step:
    """Run a training step of this rank, and count its bytes and messages."""
    parameters = list(model.parameters())
    first = parameters[0]
    # There is no fused kernel for the meta device, and nothing to compile.
    optimizer = make_optimizer(model, with_keys(config, model={"use_fused_adam": False}, training={"compile": False}))
    vars(optimizer)["is_divided"] = True  # in float16, by the loss scale: here, gradients have no values that overflow

    weights, gradients = bytes_held(model)
    FakeGroup.messages.clear()
    loss = train_step(model, data_loader)
    update_weights(model, optimizer, config.training.max_grad_norm)
    max_over_ranks(first.device, 0.0, 0.0)  # memory and stop signals
    global_mean(loss)

    return Step(
        layers=len(unwrap(model).model.layers),
        parameters=weights // first.element_size(),
        weights=weights,
        gradients=gradients,
        optimizer=sum(tensor.nbytes for p in parameters for tensor in optimizer.state_of(p).values()),
        messages=FakeGroup.messages.copy(),
    )


def route_evenly(model: nn.Module) -> None:
    """Let the routers of a model choose all experts equally often, instead of those with the largest scores."""
    for block in model.modules():
        if isinstance(block, Experts):
            vars(block)["route"] = functools.partial(choose_in_turn, block)


def choose_in_turn(block: Experts, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `Experts.route` does, but choose the experts of tokens (N, D) in turn, in numbers that have memory."""
    weights, _ = Experts.route(block, tokens)
    return weights, torch.arange(weights.numel()).view(weights.shape) % block.number


def run_rank(rank: int, config: Config, model_config: PreTrainedConfig, plan: ExecutorPlan) -> Step:
    """Play a rank, and run its training step."""
    with fake_rank(rank, config.distributed):
        return build_and_run(config, model_config, plan)


def build_and_run(config: Config, model_config: PreTrainedConfig, plan: ExecutorPlan) -> Step:
    """Build the model of the rank that is played, and run its training step."""
    dtype = getattr(torch, config.model.dtype)
    model = build_model(config, model_config, plan.wrap, META, dtype, meta_weights)
    route_evenly(model)
    length = config.training.seq_length
    tokens = np.broadcast_to(np.uint16(0), config.global_batch_size * length + 1)  # one token in memory
    data_loader = MicroBatchDataLoader(TextRows(tokens, length), config, META, shuffle=False)
    logits = 0 if config.distributed.use_cpu else cross_entropy.CHUNK_LOGITS  # in the loss, which takes META for a GPU
    try:
        with mock.patch.object(cross_entropy, "CHUNK_LOGITS", logits):
            return run_step(model, data_loader, config, make_train_step(config, plan, META, dtype))
    finally:
        model.unhook()  # a plan of a sweep builds thousands of models


def run_rank_briefly(rank: int, config: Config, model_config: PreTrainedConfig, plan: ExecutorPlan) -> Step:
    """Play a rank with one micro-batch and with two. Every further one has the messages that the second one adds."""
    layout, count = config.distributed, config.training.gradient_accumulation_steps
    # With each micro-batch, dualpipev splits another share of its backwards; others are searched, or read from a file.
    irregular = layout.pp_size > 1 and layout.pp_engine not in SCHEDULES.keys() - {"dualpipev"}
    if count <= 3 or irregular or plan.keep_activations:
        return run_rank(rank, config, model_config, plan)
    steps = []
    engine = layout.pp_engine if layout.pp_size > 1 else "1f1b"
    with fake_rank(rank, layout):
        for each in (1, 2):
            brief = with_keys(config, training={"gradient_accumulation_steps": each})
            schedule = build(engine, layout.pp_size, each, plan.schedule.chunks)
            steps.append(build_and_run(brief, model_config, dataclasses.replace(plan, schedule=schedule)))
    fewer, more = (step.messages for step in steps)
    messages = {each: fewer[each] + (more[each] - fewer[each]) * (count - 1) for each in more}
    return steps[0]._replace(messages=Counter(messages))


def run_stages(config: Config, model_config: PreTrainedConfig, plan: ExecutorPlan) -> list[Step]:
    """Return the step of one rank for each pp rank. Of pp ranks that do not differ, only the first one is played."""
    config = with_keys(config, training={"compile": False})  # compilation does not change the messages
    per_stage, played = config.distributed.cp_size * config.distributed.tp_size, {}
    kinds = [kind_of_rank(plan, rank, differences(model_config)) for rank in range(plan.schedule.pp)]
    for rank, kind in enumerate(kinds):
        if kind not in played:
            played[kind] = run_rank_briefly(rank * per_stage, config, model_config, plan)
    return [played[kind] for kind in kinds]


def kind_of_rank(plan: ExecutorPlan, rank: int, differs: Differences) -> tuple[Any, ...]:
    """Return what the step of a pp rank depends on: its stages and their neighbours, the number of its actions, and how
    many of them keep their activations.
    """
    schedule, stages = plan.schedule, plan.stages_of(rank)
    order = {number: i for i, number in enumerate(stages)}
    sends = [[0 <= i + j < len(plan.stages) and schedule.rank_of(i + j) != rank for j in (-1, 1)] for i in stages]
    actions = Counter((part.kind, order[part.stage]) for action in schedule.programs[rank] for part in action.parts)
    dense = set(differs.experts.dense) if differs.experts else set[int]()
    contents = [
        (len(stage.layers), len(dense & set(stage.layers)), stage.has_embedding, stage.has_head)
        for stage in stages.values()
    ]
    kept = Counter(order[stage] for stage, _ in plan.kept_activations(rank))
    return tuple(contents), str(sends), frozenset(actions.items()), frozenset(kept.items())


def meta_weights(name: str, shape: torch.Size, index: Index) -> Tensor:
    """A `ReadTensor` of weights without memory."""
    return torch.empty(shape, device=META)[index]


def explain(config: Config, hardware: str | None = None, gib: float | None = None) -> None:
    """Print what each rank holds, every message of a step and the bytes sent, and with `hardware` the time of a step.

    Args:
        hardware: see `find_hardware`.
        gib: memory of a device, by default that of the hardware.

    Raises:
        UserError: the layout does not fit the model, or there is no such hardware.
    """
    device = find_hardware(hardware, config) if hardware is not None else None
    config = config if device is None else on_hardware(config, device)
    layout, model_config = config.distributed, load_model_config(config.model)
    plan = check_layout(config, model_config)
    memories, steps = rank_memory(config, model_config, plan), run_stages(config, model_config, plan)
    times = forecast(config, model_config, plan, device) if device is not None else None
    idle = bubble(config, model_config, plan) if times is None else times.bubble
    columns = {}  # one for neighbouring ranks with identical numbers
    for step, identical in itertools.groupby(range(layout.pp_size), key=lambda rank: steps[rank]):
        columns[_pp_ranks(list(identical))] = step
    sizes = f"dp {layout.dp_size} x pp {layout.pp_size} x cp {layout.cp_size} x tp {layout.tp_size}"
    micro_batches = config.training.gradient_accumulation_steps
    print_line(f"{sizes}, {layout.world_size} ranks; {micro_batches} micro-batches per step")
    if experts := differences(model_config).experts:
        whole = Stage(range(model_config.num_hidden_layers), True, True)
        active, held = (
            count_parameters(part_parameters(model_config, 1, each), model_config.tie_word_embeddings, [whole])
            for each in (True, False)
        )
        print_line(
            f"{experts.number} experts in a layer: a rank holds {experts.number // layout.ep_size}, and a token uses {experts.chosen}, so "
            f"{active:,} of {held:,} parameters\n"
            "Assumed is an even load: each expert computes as many rows as any other."
        )
    memory = device.gib if gib is None and device is not None else gib
    for title, text in (
        ("The pp ranks of a pipeline", str(plan)),
        ("What a rank holds, at the peak of a step", f"{_holdings(steps, memories)}{_fits(memories, memory)}"),
        ("Messages per step: the full tensor of each, and the number in which a rank takes part", _messages(columns)),
        ("Bytes that a rank sends per step, if collectives use a ring", _traffic(columns)),
        (
            "Time of a step, estimated",
            f"bubble {idle:.1%}" if times is None or device is None else _times(times, device, config),
        ),
    ):
        print_line(f"\n{title}:\n{text}")


def _pp_ranks(ranks: list[int]) -> str:
    return f"pp {ranks[0]}" + (f"-{ranks[-1]}" if len(ranks) > 1 else "")


def _holdings(steps: list[Step], memories: list[Memory]) -> str:
    names = ["layers", "parameters", "weights", "gradients", "optimizer", "full weights", "activations", "temporary"]
    lines = []
    for step, memory in zip(steps, memories, strict=True):
        sizes = step.weights, step.gradients, step.optimizer, memory.gathered, memory.activations, memory.temporary
        lines.append([f"{step.layers:,}", f"{step.parameters:,}", *map(_bytes, sizes), _bytes(memory.total)])
    rows = [["", *names, "peak"]]
    for line, identical in itertools.groupby(range(len(lines)), key=lambda rank: lines[rank]):
        rows.append([_pp_ranks(list(identical)), *line])
    return text_table(rows, first_number=1)


def _fits(memories: list[Memory], gib: float | None) -> str:
    if gib is None:
        return ""
    peaks = [memory.total / GIB for memory in memories]
    rank, peak = peaks.index(max(peaks)), max(peaks)
    verdict = "fits" if fits(peak, gib) else "does not fit"
    return f"\npp rank {rank} needs most, {peak:.2f} GiB: it {verdict} into {usable(gib)}"


def _times(times: Forecast, hardware: Hardware, config: Config) -> str:
    rows = [["", "seconds", "share"]]
    for name, each in times.seconds._asdict().items():
        rows.append([name, f"{each:.4g}", f"{each / times.step_time:.1%}"])
    rows.append(["step", f"{times.step_time:.4g}", "100.0%"])
    mfu = "" if times.mfu is None else f", MFU {times.mfu:.1%}"
    rate = f"{times.rate} tokens/s{mfu} on {hardware.name}"
    errors = (
        f"\n{describe_errors(config, hardware)}" if hardware.cores is None else ""
    )  # all published runs are of GPUs
    return f"{text_table(rows, first_number=1)}\n{rate}{errors}"


def _messages(columns: dict[str, Step]) -> str:
    found = list(dict.fromkeys(each for step in columns.values() for each in step.messages))
    axes = list(dict.fromkeys(each.axis for each in found))
    rows = [["call site", "axis", "ranks", "operation", "dtype", "shape", "size", *columns]]
    for each in sorted(found, key=lambda each: axes.index(each.axis)):
        shape, dtype = " x ".join(map(str, each.shape)) or "scalar", str(each.dtype).removeprefix("torch.")
        counts = [f"{step.messages[each]:,}" for step in columns.values()]
        rows.append(
            [each.call_site, each.axis, str(each.ranks), each.operation, dtype, shape, _bytes(each.size), *counts]
        )
    return text_table(rows, first_number=5) if found else "none: there is one rank"


def _traffic(columns: dict[str, Step]) -> str:
    rows = [["", *columns]]
    axes = dict.fromkeys(each.axis for step in columns.values() for each in step.messages)
    rows += [[axis, *(_bytes(_sent(step, axis)) for step in columns.values())] for axis in axes]
    return text_table(rows, first_number=1) if len(rows) > 1 else "nothing"


def _sent(step: Step, axis: str) -> int:
    return sum(each.sent * times for each, times in step.messages.items() if each.axis == axis)


def _bytes(size: float) -> str:
    """A size with at least three significant digits: 8 B, 512 KiB, 1.25 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
