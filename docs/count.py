"""What a training step of the quickstart's model sends and keeps, counted, beside the formula.

    python -m docs.count data_parallel        (or tensor_parallel, pipeline_parallel, context_parallel)

The step is train.py's own, with nobody at the other end (`picotron.explain.fake_group`). Numbers are float32, sizes
MiB if nothing else is said. In the formulas, a micro-batch has B sequences of T tokens; the model has L layers, hidden
size D, intermediate size F, H query heads and K key/value heads of size d, and P parameters; p ranks have m
micro-batches.
"""

import argparse
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.context_parallel import LiveBytes, attention_work
from benchmarks.tensor_parallel import kept_by
from docs.quickstart import model_of, quickstart, stage_of, step_of
from picotron.config import Config
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket, DataParallelNaive
from picotron.explain.explain import run_rank
from picotron.explain.fake_group import fake_rank
from picotron.model import load_model_config
from picotron.optimizer import AdamW
from picotron.schedules.plan import plan_pipeline, training_schedule
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, peak_activations, simulate
from picotron.text_table import text_table

MIB = 2**20
CONFIG = quickstart()
MODEL = load_model_config(CONFIG.model)
B, T = CONFIG.training.micro_batch_size, CONFIG.training.seq_length
L, D, F, V = MODEL.num_hidden_layers, MODEL.hidden_size, MODEL.intermediate_size, MODEL.vocab_size
HD, KD = MODEL.num_attention_heads * MODEL.head_dim, MODEL.num_key_value_heads * MODEL.head_dim
BTD, VD = (4 * n / MIB for n in (B * T * D, V * D))
one_micro_batch = partial(quickstart, gradient_accumulation_steps=1)
Row = tuple[Any, ...]


class Sent(NamedTuple):
    """What a rank sends in a step, by operation; collectives go around a ring."""

    messages: Counter[str]
    mib: dict[str, float]


def sent(config: Config, rank: int = 0, wrapper: Callable[..., DataParallel] = DataParallelBucket) -> Sent:
    """Without the single numbers of clipping and logging."""
    with mock.patch("picotron.parallelize.DataParallelBucket", wrapper):
        step = run_rank(rank, config, MODEL, plan_pipeline(config, MODEL))
    found = Sent(Counter(), defaultdict(float))
    for message, times in step.messages.items():
        if message.shape:
            found.messages[message.operation] += times
            found.mib[message.operation] += times * message.sent / MIB
    return found


def parameters() -> int:
    with fake_rank(0, CONFIG.distributed):
        return sum(p.numel() for p in stage_of(CONFIG).parameters())


def gradients_sent() -> Iterator[Row]:
    """What a rank sends in a step. Formula: 2 (dp - 1)/dp P numbers."""
    small = partial(DataParallelBucket, bucket_mb=4)
    wrappers: dict[str, Callable[..., DataParallel]] = {
        "naive": DataParallelNaive,
        "buckets of 25 MB": DataParallelBucket,
        "buckets of 4 MB": small,
    }
    cases = [(2, name, 1) for name in wrappers] + [(dp, "buckets of 4 MB", m) for dp, m in ((2, 4), (4, 1), (8, 1))]
    P = 4 * parameters() / MIB
    yield "", "micro-batches", "messages", "counted", "formula"
    for dp, name, m in cases:
        messages, mib = sent(quickstart(dp_size=dp, gradient_accumulation_steps=m), wrapper=wrappers[name])
        yield f"dp {dp}, {name}", m, messages.total(), sum(mib.values()), 2 * (dp - 1) / dp * P


def bytes_per_parameter() -> Iterator[Row]:
    """What a rank keeps for each parameter between steps, in bytes, for any dp_size."""
    yield "", "weight", "main_grad", "optimizer", "counted", "formula"
    for dtype, formula in ((torch.float32, "4 + 4 + 8"), (torch.bfloat16, "2 + 4 + 4 + 8")):
        with fake_rank(0, CONFIG.distributed):
            model = model_of(CONFIG, dtype)
            optimizer = AdamW(model.parameters(), CONFIG.training, fused=False)
            optimizer.step()
        weights = sum(p.nbytes for p in model.parameters())
        gradients = sum(bucket.buffer.nbytes for bucket in model.buckets)
        states = sum(t.nbytes for p in model.parameters() for t in optimizer.state_of(p).values())
        each = [n / parameters() for n in (weights, gradients, states, weights + gradients + states)]
        yield str(dtype).removeprefix("torch."), *each, formula


TP_LAYOUTS = ((1, False), (2, False), (2, True), (4, False), (4, True))


def hidden_states_sent() -> Iterator[Row]:
    """What a rank sends for a micro-batch. A unit is (tp - 1)/tp B T D numbers. A layer sends 8 units, with sequence
    parallelism 10; embedding and head 4; the loss 6/D. Then the number of messages of each kind.
    """
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    yield "", "unit", "units", "formula", "counted", *kinds
    for tp, sp in TP_LAYOUTS:
        messages, mib = sent(one_micro_batch(tp_size=tp, sequence_parallel=sp))
        unit, units = (tp - 1) / tp * BTD, L * (10 if sp else 8) + 4 + 6 / D
        yield tp_name(tp, sp), unit, units, units * unit, sum(mib.values(), 0.0), *(messages[k] for k in kinds)


def layer_kept() -> Iterator[Row]:
    """What a rank holds: its parameters, and what a layer's forward keeps for its backward. The norms keep s = 6 B T D
    numbers, the blocks p = B T (2 H d + 2 K d + 4 F).
    """
    s, p = 6 * BTD, B * T * (2 * HD + 2 * KD + 4 * F) * 4 / MIB
    yield "", "parameters", "kept, counted", "kept, formula", ""
    for tp, sp in TP_LAYOUTS:
        config = one_micro_batch(tp_size=tp, sequence_parallel=sp)
        formula, text = ((s + p) / tp, "(s + p)/tp") if sp else (s + p / tp, "s + p/tp")
        with fake_rank(0, config.distributed):
            stage = stage_of(config)
            held = sum(parameter.nbytes for parameter in stage.parameters()) / MIB
            kept = kept_by(stage.module.model.layers["0"], (B, T // tp if sp else T, D), T) / MIB
        yield tp_name(tp, sp), held, kept, formula, text


def tp_name(tp: int, sequence_parallel: bool) -> str:
    return f"tp {tp}" + (", sequence parallel" if sequence_parallel else "")


def stages_sent() -> Iterator[Row]:
    """What each rank sends in a step of m = 4 micro-batches: B T D numbers for each micro-batch and each neighbour that
    a stage of it has on another rank. If the first and the last stage are on two ranks, these also sum the gradient of
    the tied embedding, V D numbers.
    """
    yield "", "rank", "sends", "activations", "tied", "counted", "formula"
    for engine, p in (("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2)):
        config = quickstart(pp_size=p, pp_engine=engine, gradient_accumulation_steps=4)
        schedule = training_schedule(config)
        last = schedule.num_stages - 1
        for rank in range(p):
            around = [n for stage in schedule.stages_of(rank) for n in (stage - 1, stage + 1) if 0 <= n <= last]
            away = sum(schedule.rank_of(n) != rank for n in around)
            tied = VD if schedule.rank_of(0) != schedule.rank_of(last) and rank in (0, p - 1) else 0.0
            messages, mib = sent(config, rank)
            counted = (mib["send"], mib["all-reduce"], sum(mib.values()))
            yield f"{engine}, pp {p}", rank, messages["send"], *counted, 4 * away * BTD + tied


def micro_batches_kept() -> Iterator[Row]:
    """The most that rank 0 of 4 has in memory during a step, without weights and gradients; and how many micro-batches'
    activations wait for their backward then: m in AFAB, min(m, p) in 1F1B.
    """

    def peak(engine: str, m: int) -> float:
        config = quickstart(pp_size=4, pp_engine=engine, gradient_accumulation_steps=m)
        with fake_rank(0, config.distributed):
            step = step_of(config)
            with LiveBytes(not_counted=[]) as live:
                step()
        return live.peak / MIB

    yield "", "AFAB", "waiting", "1F1B", "waiting"
    for m in (1, 2, 4, 8):
        waiting = {engine: peak_activations(build(engine, 4, m).programs[0]) for engine in ("afab", "1f1b")}
        yield f"m {m}", peak("afab", m), waiting["afab"], peak("1f1b", m), waiting["1f1b"]


def bubbles() -> Iterator[Row]:
    """The bubble, simulated. A backward takes as long as two forwards, each half of one as long as one."""

    def bubble(engine: str, p: int, m: int) -> float:
        schedule = build(engine, p, m)
        return simulate(schedule, Costs(weights=[1 / schedule.chunks] * schedule.num_stages)).bubble

    cases = ((4, 4), (4, 8), (4, 32), (8, 32))
    yield "", *(f"p {p}, m {m}" for p, m in cases)
    for engine in SCHEDULES:
        yield engine, *(f"{bubble(engine, p, m):.1%}" for p, m in cases)
    yield "(p - 1)/(m + p - 1)", *(f"{(p - 1) / (m + p - 1):.1%}" for p, m in cases)


def keys_and_values_sent() -> Iterator[Row]:
    """What a rank sends for a micro-batch: of a layer's q = B T H d queries and kv = 2 B T K d keys and values; and to
    average the gradients of the weights, 2 (cp - 1)/cp P.
    """
    q, kv, P = (4 * n / MIB for n in (B * T * HD, 2 * B * T * KD, parameters()))
    formulas: dict[str, tuple[str, Callable[[int], float]]] = {
        "ring": ("(3 cp - 2)/cp kv", lambda cp: (3 * cp - 2) / cp * kv),
        "all_gather": ("3 (cp - 1)/cp kv", lambda cp: 3 * (cp - 1) / cp * kv),
        "ulysses": ("2 (cp - 1)/cp (2 q + kv)/cp", lambda cp: 2 * (cp - 1) / cp * (2 * q + kv) / cp),
    }
    yield "", "a layer", "formula", "", "gradients", "formula"
    for cp in (2, 4):
        for engine, (text, formula) in formulas.items():
            _, mib = sent(one_micro_batch(cp_size=cp, cp_engine=engine))
            gradients = mib.pop("all-reduce")
            yield f"cp {cp}, {engine}", sum(mib.values()) / L, formula(cp), text, gradients, 2 * (cp - 1) / cp * P


def parts_of_sequences() -> Iterator[Row]:
    """The busiest rank's attention work over the mean, in query-key pairs; and what a layer's forward keeps for its
    backward on a rank, beside 1/cp of what it is on one.
    """

    def kept(config: Config) -> float:
        length = T // config.distributed.cp_size
        with fake_rank(0, config.distributed):
            return kept_by(stage_of(config).module.model.layers["0"], (B, length, D), length) / MIB

    yield "", "zigzag", "contiguous", "(2 cp - 1)/cp", "kept", "formula"
    for cp in (1, 2, 4, 8):
        work = [attention_work(cp, sharding) for sharding in ("zigzag", "contiguous")]
        yield f"cp {cp}", *work, (2 * cp - 1) / cp, kept(quickstart(cp_size=cp)), kept(CONFIG) / cp


PAGES = {
    "data_parallel": (gradients_sent, bytes_per_parameter),
    "tensor_parallel": (hidden_states_sent, layer_kept),
    "pipeline_parallel": (stages_sent, micro_batches_kept, bubbles),
    "context_parallel": (keys_and_values_sent, parts_of_sequences),
}


def show(table: Callable[[], Iterator[Row]]) -> None:
    """Print a table below its docstring, the first column to the left."""
    cells = [[f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in table()]
    print(inspect.getdoc(table), text_table(cells, first_number=1), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=PAGES)
    for each in PAGES[parser.parse_args().page]:
        show(each)
