"""Traffic and memory of a training step of the quickstart's model, counted and by formula:

    python -m docs.programs.count data_parallel        (or tensor_parallel, pipeline_parallel, context_parallel, zero)

The step is that of train.py, run by one rank in a fake process group (`picotron.explain.fake_group`). Numbers are
float32. In the formulas, a micro-batch has B sequences of T tokens; the model has L layers, hidden size D, intermediate
size F, H query heads and K key/value heads of size d, vocabulary size V, and P parameters; p pp ranks run m
micro-batches per step.
"""

import argparse
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.context_parallel import LiveBytes, attention_work
from benchmarks.tensor_parallel import kept_by
from docs.programs.quickstart import model_of, quickstart, stage_of, step_of
from picotron.config import Config
from picotron.console import text_table
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket, DataParallelNaive
from picotron.explain.explain import Step, run_rank
from picotron.explain.fake_group import fake_rank
from picotron.model.model_config import load_model_config
from picotron.optimizer import AdamW
from picotron.pipeline_parallel.plan import plan_pipeline, training_schedule
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, peak_activations, simulate

MIB = 2**20
CONFIG = quickstart()
MODEL = load_model_config(CONFIG.model)
B, T = CONFIG.training.micro_batch_size, CONFIG.training.seq_length
L, D, F, V = MODEL.num_hidden_layers, MODEL.hidden_size, MODEL.intermediate_size, MODEL.vocab_size
HD, KD = MODEL.num_attention_heads * MODEL.head_dim, MODEL.num_key_value_heads * MODEL.head_dim
BTD, VD = (4 * n / MIB for n in (B * T * D, V * D))
one_micro_batch = functools.partial(quickstart, gradient_accumulation_steps=1)
Row = tuple[Any, ...]


class Traffic(NamedTuple):
    """Collectives and messages of a rank in a step, by operation. Collectives use a ring."""

    counts: Counter[str]  # collectives and messages
    mib: dict[str, float]  # sent by the rank


def traffic(config: Config, rank: int = 0, wrapper: Callable[..., DataParallel] = DataParallelBucket) -> Traffic:
    """Count what a rank sends in a step, except the few numbers of clipping and metrics."""
    with mock.patch("picotron.parallelize.DataParallelBucket", wrapper):
        step = run_rank(rank, config, MODEL, plan_pipeline(config, MODEL))
    sent = Traffic(Counter(), defaultdict(float))
    for message, times in step.messages.items():
        if message.shape and message.axis != "world":
            sent.counts[message.operation] += times
            sent.mib[message.operation] += times * message.sent / MIB
    return sent


@functools.cache
def number_of_parameters() -> int:
    with fake_rank(0, CONFIG.distributed):
        return sum(p.numel() for p in stage_of(CONFIG).parameters())


def gradients_sent() -> Iterator[Row]:
    """Traffic of a rank per step. Formula: 2 (dp - 1)/dp P numbers."""
    wrappers: dict[str, Callable[..., DataParallel]] = {
        "naive": DataParallelNaive,
        "buckets of 25 MiB": DataParallelBucket,
        "buckets of 0.7 MiB": functools.partial(DataParallelBucket, bucket_mb=0.7),
    }
    cases = [(2, name, 1) for name in wrappers] + [(dp, "buckets of 0.7 MiB", m) for dp, m in ((2, 4), (4, 1), (8, 1))]
    P = 4 * number_of_parameters() / MIB
    yield "", "micro-batches", "collectives", "counted, MiB", "formula, MiB"
    for dp, name, m in cases:
        counts, mib = traffic(quickstart(dp_size=dp, gradient_accumulation_steps=m), wrapper=wrappers[name])
        yield f"dp {dp}, {name}", m, counts.total(), sum(mib.values()), 2 * (dp - 1) / dp * P


def bytes_per_parameter() -> Iterator[Row]:
    """Memory of a rank between steps, in bytes per parameter, for any dp_size."""
    yield "", "weight", "main_grad", "optimizer", "sum, counted", "sum, formula"
    for dtype, formula in ((torch.float32, "4 + 4 + 8"), (torch.bfloat16, "2 + 4 + 4 + 8")):
        with fake_rank(0, CONFIG.distributed):
            model = model_of(CONFIG, dtype)
            optimizer = AdamW(model.parameters(), CONFIG.training, fused=False)
            optimizer.step()
        weights = sum(p.nbytes for p in model.parameters())
        gradients = sum(bucket.buffer.nbytes for bucket in model.buckets)
        states = sum(t.nbytes for p in model.parameters() for t in optimizer.state_of(p).values())
        sizes = (weights, gradients, states, weights + gradients + states)
        yield str(dtype).removeprefix("torch."), *(n / number_of_parameters() for n in sizes), formula


TP_LAYOUTS = ((1, False), (2, False), (2, True), (4, False), (4, True))  # tp_size, sequence_parallel


def tp_name(tp: int, sequence_parallel: bool) -> str:
    return f"tp {tp}" + (", sequence parallel" if sequence_parallel else "")


def hidden_states_sent() -> Iterator[Row]:
    """Traffic of a rank per micro-batch. A unit is (tp - 1)/tp B T D numbers. A layer sends 8 units, with sequence
    parallelism 10; embedding and head together 4; the loss 6/D. The last three columns are numbers of collectives.
    """
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    yield "", "unit, MiB", "units", "formula, MiB", "counted, MiB", *(f"{kind}s" for kind in kinds)
    for tp, sp in TP_LAYOUTS:
        counts, mib = traffic(one_micro_batch(tp_size=tp, sequence_parallel=sp))
        unit, units = (tp - 1) / tp * BTD, L * (10 if sp else 8) + 4 + 6 / D
        yield tp_name(tp, sp), unit, units, units * unit, sum(mib.values(), 0.0), *(counts[kind] for kind in kinds)


def layer_kept() -> Iterator[Row]:
    """Memory of a rank: its parameters, and the activations that one layer keeps for its backward. The two norms keep
    norms = 6 B T D numbers, attention and MLP keep blocks = B T (2 H d + 2 K d + 4 F) numbers.
    """
    norms, blocks = 6 * BTD, B * T * (2 * HD + 2 * KD + 4 * F) * 4 / MIB
    yield "", "parameters, MiB", "kept, counted, MiB", "kept, formula, MiB", "formula"
    for tp, sp in TP_LAYOUTS:
        config = one_micro_batch(tp_size=tp, sequence_parallel=sp)
        size, formula = (
            ((norms + blocks) / tp, "(norms + blocks)/tp") if sp else (norms + blocks / tp, "norms + blocks/tp")
        )
        with fake_rank(0, config.distributed):
            stage = stage_of(config)
            parameters = sum(parameter.nbytes for parameter in stage.parameters()) / MIB
            kept = kept_by(stage.module.model.layers["0"], (B, T // tp if sp else T, D), T) / MIB
        yield tp_name(tp, sp), parameters, kept, size, formula


def stages_sent() -> Iterator[Row]:
    """Traffic of each pp rank in a step of m = 4 micro-batches: B T D numbers per micro-batch for each neighbour of its
    stages that is on another rank. If the first and the last stage are on two ranks, these two also sum the gradients
    of the tied embedding, V D numbers.
    """
    yield "", "pp rank", "messages", "messages, MiB", "tied, MiB", "counted, MiB", "formula, MiB"
    for engine, p in (("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2)):
        config = quickstart(pp_size=p, pp_engine=engine, gradient_accumulation_steps=4)
        schedule = training_schedule(config)
        last = schedule.num_stages - 1
        for rank in range(p):
            neighbours = [n for stage in schedule.stages_of(rank) for n in (stage - 1, stage + 1) if 0 <= n <= last]
            on_other_ranks = sum(schedule.rank_of(n) != rank for n in neighbours)
            tied = VD if schedule.rank_of(0) != schedule.rank_of(last) and rank in (0, p - 1) else 0.0
            counts, mib = traffic(config, rank)
            counted = (mib["send"], mib["all-reduce"], sum(mib.values()))
            yield f"{engine}, pp {p}", rank, counts["send"], *counted, 4 * on_other_ranks * BTD + tied


def micro_batches_kept() -> Iterator[Row]:
    """Peak memory of pp rank 0 of 4 in a step of m micro-batches, without weights and gradients, and the largest number
    of micro-batches that wait for their backward: m in AFAB, min(m, p) in 1F1B.
    """

    def peak(engine: str, m: int) -> float:
        config = quickstart(pp_size=4, pp_engine=engine, gradient_accumulation_steps=m)
        with fake_rank(0, config.distributed):
            step = step_of(config)
            with LiveBytes() as live:
                step()
        return live.peak / MIB

    yield "m", "AFAB, MiB", "AFAB, micro-batches", "1F1B, MiB", "1F1B, micro-batches"
    for m in (1, 2, 4, 8):
        waiting = {engine: peak_activations(build(engine, 4, m).programs[0]) for engine in ("afab", "1f1b")}
        yield str(m), peak("afab", m), waiting["afab"], peak("1f1b", m), waiting["1f1b"]


def bubbles() -> Iterator[Row]:
    """Bubble for p pp ranks and m micro-batches, simulated: a backward takes as long as two forwards, each half of a
    split backward as long as one, and messages take no time.
    """

    def bubble(engine: str, p: int, m: int) -> float:
        schedule = build(engine, p, m)
        return simulate(schedule, Costs(weights=[1 / schedule.chunks] * schedule.num_stages)).bubble

    cases = ((4, 4), (4, 8), (4, 32), (8, 32))
    yield "", *(f"p = {p}, m = {m}" for p, m in cases)
    for engine in SCHEDULES:
        yield engine, *(f"{bubble(engine, p, m):.1%}" for p, m in cases)
    yield "(p - 1)/(m + p - 1)", *(f"{(p - 1) / (m + p - 1):.1%}" for p, m in cases)


def zero_step(engine: str, n: int, m: int = 1) -> Step:
    """Return what rank 0 of n holds and sends, in bfloat16 with m micro-batches."""
    config = quickstart(dp_size=n, dp_engine=engine, gradient_accumulation_steps=m)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    return run_rank(0, config, MODEL, plan_pipeline(config, MODEL))


ENGINES = ("bucket", "zero1", "zero3")


def bytes_held() -> Iterator[Row]:
    """Memory of one of n ranks between steps, in bytes per parameter, in bfloat16."""
    formulas = {"bucket": "2 + 4 + 12", "zero1": "2 + 4 + 12/n", "zero3": "(2 + 4 + 12)/n"}
    yield "", "weight", "gradient", "optimizer", "sum, counted", "sum, formula", "formula"
    for n in (2, 4, 8):
        sums = {"bucket": 18.0, "zero1": 6 + 12 / n, "zero3": 18 / n}
        for engine in ENGINES:
            step = zero_step(engine, n)
            held = [size / number_of_parameters() for size in (step.weights, step.gradients, step.optimizer)]
            yield f"n = {n}, {engine}", *held, sum(held), sums[engine], formulas[engine]


def bytes_sent() -> Iterator[Row]:
    """Traffic of one of n ranks in a step of m micro-batches, in bytes per parameter, in bfloat16. Formula: (n - 1)/n
    times 4 + 4 (bucket), 4 + 2 (zero1), or at most (2 + 2 + 4) m (zero3, whose last layer is gathered once).
    """
    yield "", "m", "collectives", "counted", "formula"
    for n, m in ((2, 1), (2, 4), (8, 1), (8, 4)):
        for engine, full in (("bucket", 8), ("zero1", 6), ("zero3", 8 * m)):
            messages = zero_step(engine, n, m).messages
            ours = {message: times for message, times in messages.items() if message.axis == "cp_dp" and message.shape}
            sent = sum(times * message.sent for message, times in ours.items()) / number_of_parameters()
            yield f"n = {n}, {engine}", m, sum(ours.values()), sent, full * (n - 1) / n


def keys_and_values_sent() -> Iterator[Row]:
    """Traffic of a rank per micro-batch: for the attention of one layer, with q = B T H d queries and kv = 2 B T K d
    keys and values; and to average the gradients, 2 (cp - 1)/cp P numbers.
    """
    q, kv, P = (4 * n / MIB for n in (B * T * HD, 2 * B * T * KD, number_of_parameters()))
    formulas: dict[str, tuple[str, Callable[[int], float]]] = {
        "ring": ("(3 cp - 2)/cp kv", lambda cp: (3 * cp - 2) / cp * kv),
        "all_gather": ("3 (cp - 1)/cp kv", lambda cp: 3 * (cp - 1) / cp * kv),
        "ulysses": ("2 (cp - 1)/cp (2 q + kv)/cp", lambda cp: 2 * (cp - 1) / cp * (2 * q + kv) / cp),
    }
    yield "", "attention, MiB", "formula, MiB", "formula", "gradients, MiB", "formula, MiB"
    for cp in (2, 4):
        for engine, (text, formula) in formulas.items():
            _, mib = traffic(one_micro_batch(cp_size=cp, cp_engine=engine))
            gradients = mib.pop("all-reduce")
            yield f"cp {cp}, {engine}", sum(mib.values()) / L, formula(cp), text, gradients, 2 * (cp - 1) / cp * P


def work_and_memory() -> Iterator[Row]:
    """Attention work of the busiest rank divided by the mean over ranks, in blocks of the first picture (one on the
    diagonal counts half), with the formula for contiguous shards; and the activations that one layer keeps for its
    backward on a rank, with 1/cp of those of one process as formula.
    """

    def kept(config: Config) -> float:
        length = T // config.distributed.cp_size
        with fake_rank(0, config.distributed):
            return kept_by(stage_of(config).module.model.layers["0"], (B, length, D), length) / MIB

    yield "", "zigzag", "contiguous", "(2 cp - 1)/cp", "kept, MiB", "formula, MiB"
    for cp in (1, 2, 4, 8):
        work = [attention_work(cp, sharding) for sharding in ("zigzag", "contiguous")]
        yield f"cp {cp}", *work, (2 * cp - 1) / cp, kept(quickstart(cp_size=cp)), kept(CONFIG) / cp


PAGES = {
    "data_parallel": (gradients_sent, bytes_per_parameter),
    "tensor_parallel": (hidden_states_sent, layer_kept),
    "pipeline_parallel": (stages_sent, micro_batches_kept, bubbles),
    "context_parallel": (keys_and_values_sent, work_and_memory),
    "zero": (bytes_held, bytes_sent),
}


def show(table: Callable[[], Iterator[Row]]) -> None:
    """Print a table below its docstring. The first column is aligned to the left."""
    cells = [[f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in table()]
    print(inspect.getdoc(table), text_table(cells, first_number=1), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=PAGES)
    for each in PAGES[parser.parse_args().page]:
        show(each)
