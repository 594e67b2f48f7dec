"""No schedule and no layout hangs on NCCL: the calls of whole steps, recorded on all ranks, finish under its rules."""

import itertools
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.oracle import tiny_llama
from conformance.training import layout_name, pipeline_config
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.pipeline_parallel.plan import training_schedule
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import LOOPS, SCHEDULES, build
from picotron.schedules.simulate import simulate
from tests.support.nccl_calls import Event, Operation, Program, most_in_flight
from tests.support.nccl_order import Deadlock, Play
from tests.support.nccl_programs import record, record_rank

ENGINES = [*SCHEDULES, *(f"executor {name}" for name in LOOPS)]  # the executor runs all schedules except LOOPS anyway
CHUNKS = [(engine, None) for engine in ENGINES] + [("looped_bfs", 3), ("interleaved_1f1b", 3)]
LAYOUTS: list[dict[str, Any]] = [  # with several groups
    {"dp_size": 4},
    {"cp_size": 4, "dp_size": 2, "training__activation_checkpointing": "full"},
    {"tp_size": 4, "cp_size": 2, "sequence_parallel": True},  # two tp ranks hold the same key/value head
    {"pp_size": 2, "cp_size": 2, "dp_size": 2},
    {"pp_size": 2, "cp_size": 2, "dp_size": 2, "cp_engine": "all_gather", "pp_engine": "zb_h1"},
    {"pp_size": 2, "cp_size": 2, "dp_size": 2, "cp_engine": "ulysses", "pp_engine": "dualpipev"},
    {"pp_size": 2, "tp_size": 2, "dp_size": 2, "sequence_parallel": True},
    {"pp_size": 2, "tp_size": 4, "cp_size": 2, "pp_engine": "zbv"},
    {"pp_size": 2, "tp_size": 2, "cp_size": 2, "dp_size": 2, "sequence_parallel": True, "pp_engine": "zb_h1"},
    {"pp_size": 4, "dp_size": 2, "pp_engine": "afab"},
    {"pp_size": 4, "dp_size": 2, "pp_engine": "interleaved_1f1b", "training__activation_checkpointing": "full"},
    *({"dp_size": 2, "tp_size": 2, "sequence_parallel": True, "dp_engine": engine} for engine in ("zero1", "zero3")),
    {"cp_size": 2, "dp_size": 2, "dp_engine": "zero3", "training__activation_checkpointing": "full"},
    *(
        {"pp_size": 2, "cp_size": 2, "dp_size": 2, "pp_engine": schedule, "dp_engine": engine}
        for engine in ("zero1", "zero3")
        for schedule in ("1f1b", "zbv")
    ),
    {"pp_size": 4, "dp_size": 2, "pp_engine": "interleaved_1f1b", "dp_engine": "zero3"},
]


@pytest.fixture(autouse=True)
def _no_grid_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgm, "process_group_manager", None)


def recorded(config: Config, tied: bool = False) -> list[Program]:
    """Record a step and an evaluation of a model with one layer per stage, at least two."""
    layers = max(2, training_schedule(config).num_stages)
    return record(config, tiny_llama(num_hidden_layers=layers, tie_word_embeddings=tied))


def pipeline(folder: Path, engine: str, pp: int, micro_batches: int, chunks: int | None = None) -> list[Program]:
    """Record a pipeline. "executor 1f1b" stands for a file with the schedule 1f1b, which the executor runs."""
    if engine.startswith("executor"):
        file = folder / f"{pp} {micro_batches}.csv"
        file.write_text(as_csv(build(engine.removeprefix("executor "), pp, micro_batches).programs))
        engine = f"csv:{file}"
    return recorded(pipeline_config(engine, pp, micro_batches, pp_chunks=chunks, training__eval_steps=1))


def several_groups(layout: dict[str, Any], micro_batches: int = 3) -> list[Program]:
    """Record a layout. The embeddings are tied, so the ends of a pipeline form another group."""
    keys = {"pp_engine": "1f1b", "pp_size": 1} | layout
    config = pipeline_config(keys.pop("pp_engine"), keys.pop("pp_size"), micro_batches, training__eval_steps=1, **keys)
    return recorded(config, tied=True)


def assert_finishes(programs: list[Program], seeds: int = 1) -> None:
    """Play programs with equal and with random times, and with messages shorter and longer than computations."""
    times = [Play(programs, one_at_a_time=True).run()]
    for seed, longest, one_at_a_time in itertools.product(range(seeds), (0.1, 10.0), (False, True)):
        times.append(with_random_times(programs, random.Random(seed), longest, one_at_a_time).run())
    assert len(set(times)) > 2 * seeds, "the times are not random"


def with_random_times(programs: list[Program], rng: random.Random, longest: float, one_at_a_time: bool) -> Play:
    return Play(programs, lambda event: rng.uniform(0, 2), lambda: rng.uniform(0, longest), one_at_a_time)


# ----------------------------------------------------------------------------------------------------------- real steps


@pytest.mark.parametrize(("engine", "chunks"), CHUNKS)
def test_pipelines_finish(tmp_path: Path, engine: str, chunks: int | None) -> None:
    for pp, micro_batches in ((2, 1), (2, 5), (3, 4), (4, 2), (4, 6)):
        assert_finishes(pipeline(tmp_path, engine, pp, micro_batches, chunks))


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_steps_with_several_groups_finish(layout: dict[str, Any]) -> None:
    programs = several_groups(layout)
    assert_finishes(programs)
    # With ZeRO-3, gradients are reduced while messages of a pipeline are in flight.
    assert max(map(most_in_flight, programs)) <= (4 if layout.get("dp_engine") == "zero3" else 3)


def test_steps_never_wait_for_a_value() -> None:
    """On the meta device, tensors have no values, so a step would fail that reads one, for which the CPU waits."""
    config = pipeline_config("zb_h1", 2, 2, cp_size=2, dp_size=2, training__eval_steps=1)
    for rank in (0, 7):
        on_cpu, on_meta = (record_rank(rank, config, tiny_llama(), torch.device(name)) for name in ("cpu", "meta"))
        assert on_cpu == on_meta


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_take_as_long_as_simulated(tmp_path: Path, engine: str) -> None:
    """If messages take no time, the order of the messages costs none, either."""
    for pp, micro_batches in ((2, 4), (4, 6)):
        schedule = build(engine.removeprefix("executor "), pp, micro_batches)
        programs = [until_evaluation(program) for program in pipeline(tmp_path, engine, pp, micro_batches)]
        for one_at_a_time in (False, True):
            assert Play(programs, forwards, one_at_a_time=one_at_a_time).run() == simulate(schedule).step_time


def forwards(event: Event) -> float:
    """Return the time of an event, in forwards of one micro-batch in one stage."""
    return sum(2 if kind == "B" else 1 for kind in re.findall("[A-Z]", getattr(event, "action", "")))


def until_evaluation(program: Program) -> Program:
    """Return the part of a program before its metrics, which are followed by the evaluation."""
    metrics = (i for i, event in enumerate(program) if isinstance(event, Operation) and "metrics" in event.call_site)
    return program[: next(metrics)]


# ------------------------------------------------------------------------------------------------------------- controls


def swapped(program: Program, i: int, j: int) -> Program:
    """Return a program that calls two operations in each other's place."""
    first, second = program[i], program[j]
    assert isinstance(first, Operation)
    assert isinstance(second, Operation)
    changed = list(program)
    changed[i], changed[j] = second._replace(handle=first.handle), first._replace(handle=second.handle)
    return changed


def calls(program: Program, call_site: str) -> list[int]:
    """Return the positions of the operations that a file or function calls."""
    return [i for i, event in enumerate(program) if isinstance(event, Operation) and call_site in event.call_site]


@pytest.mark.parametrize("engine", SCHEDULES)
def test_swapped_messages_hang(tmp_path: Path, engine: str) -> None:
    """One rank of two calls two neighbouring, different messages in the wrong order, and its GPU runs one at a time.

    In the loop of 1F1B, four of six such swaps do no harm: each batch has messages in both directions.
    """
    outcomes = swap_messages(pipeline(tmp_path, engine, 2, 4))
    assert outcomes == ({Deadlock: 2, None: 4} if engine == "1f1b" else {Deadlock: outcomes.total()})


def swap_messages(programs: list[Program]) -> Counter[type[Deadlock] | None]:
    """Return how many plays hang, and how many do not, with one swap each."""
    outcomes: Counter[type[Deadlock] | None] = Counter()
    for rank, program in enumerate(programs):
        messages = [i for i in calls(program, "") if program[i].is_batch]
        for i, j in itertools.pairwise(messages):
            if program[i].parts != program[j].parts:
                try:
                    wrong = [*programs[:rank], swapped(program, i, j), *programs[rank + 1 :]]
                    Play(wrong, one_at_a_time=True).run()
                    outcomes[None] += 1
                except Deadlock:
                    outcomes[Deadlock] += 1
    return outcomes
