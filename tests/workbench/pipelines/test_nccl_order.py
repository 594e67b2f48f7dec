"""No schedule and no layout hangs on NCCL: the calls of whole steps, recorded on all ranks, finish under its rules."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.nccl_programs import record
from tests.support.oracle import make_config, tiny_llama
from workbench.pipelines.planning import training_schedule
from workbench.schedules.actions import parse_action
from workbench.schedules.nccl_calls import Compute, Event, Operation, Program, most_in_flight
from workbench.schedules.nccl_order import Play
from workbench.schedules.nccl_step import simulate_nccl
from workbench.schedules.schedule_csv import as_csv
from workbench.schedules.schedules import LOOPS, SCHEDULES, build
from workbench.schedules.simulate import Costs, simulate

pytestmark = pytest.mark.usefixtures("_no_grid_is_left")

ENGINES = [*SCHEDULES, *(f"executor {name}" for name in LOOPS)]  # the executor runs all schedules except LOOPS anyway
CHUNKS = [(engine, None) for engine in ENGINES] + [("looped_bfs", 3), ("interleaved_1f1b", 3)]
LAYOUTS = [  # with several groups
    "dp4",
    "cp4 dp2 full",
    "tp4 cp2 sp",  # two tp ranks hold the same key/value head
    "pp2 cp2 dp2 all_gather zb_h1",
    "pp2 cp2 dp2 ulysses dualpipev",
    "pp2 tp2 cp2 dp2 sp zb_h1",
    *(
        f"dp2 {others} {engine}"
        for engine in ("zero1", "zero3")
        for others in ("tp2 sp", "pp2 cp2 1f1b", "pp2 cp2 zbv")
    ),
    "pp4 dp2 interleaved_1f1b zero3",
    "dp4 ep2",
    "pp2 tp2 dp2 sp zbv ep2",
    "dp4 zero3 full ep2",
]


def recorded(layout: str, micro_batches: int, family: str = "llama", tied: bool = False, **keys: Any) -> list[Program]:
    """Record a step and an evaluation of a model with one layer per stage, at least two."""
    config = make_config(f"{layout} m{micro_batches}", training__eval_steps=1, **keys)
    layers = max(2, training_schedule(config).num_stages)
    return record(config, tiny_llama(family, num_hidden_layers=layers, tie_word_embeddings=tied))


def pipeline(folder: Path, engine: str, pp: int, micro_batches: int, chunks: int | None = None) -> list[Program]:
    """Record a pipeline. "executor 1f1b" stands for a file with the schedule 1f1b, which the executor runs."""
    if engine.startswith("executor"):
        file = folder / f"{pp} {micro_batches}.csv"
        file.write_text(as_csv(build(engine.removeprefix("executor "), pp, micro_batches).programs))
        engine = f"csv:{file}"
    return recorded(f"pp{pp}", micro_batches, pp_engine=engine, pp_chunks=chunks)


def assert_finishes(programs: list[Program]) -> None:
    for one_at_a_time in (False, True):
        Play(programs, one_at_a_time=one_at_a_time).run()


@pytest.mark.parametrize(("engine", "chunks"), CHUNKS)
def test_pipelines_finish_and_take_as_long_as_simulated(tmp_path: Path, engine: str, chunks: int | None) -> None:
    """If messages take no time, and all stages the same, the order of the messages costs none, either. With unequal
    stages, it can: `simulate_nccl` makes the calls of the executor.
    """
    for pp, micro_batches in ((2, 5), (3, 1), (4, 5)):
        schedule = build(engine.removeprefix("executor "), pp, micro_batches, chunks)
        recordings = pipeline(tmp_path, engine, pp, micro_batches, chunks)
        assert_finishes(recordings)
        programs = [until_evaluation(program) for program in recordings]
        for program, actions in zip(programs, schedule.programs, strict=True):
            names = [str(each).strip("0123456789" if engine in LOOPS else "") for each in actions]
            assert [event.action for event in program if isinstance(event, Compute)] == names
        for one_at_a_time in (False, True):
            played = Play(programs, functools.partial(time_of, Costs()), one_at_a_time).run()
            assert played == simulate(schedule).step_time
        if engine not in LOOPS:
            unequal = Costs(weights=[1.0 + stage * 3 % 4 / 4 for stage in range(schedule.num_stages)])
            played = Play(programs, functools.partial(time_of, unequal)).run()
            assert played == pytest.approx(simulate_nccl(schedule, unequal).step_time)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_with_several_groups_finish(layout: str) -> None:
    """The embeddings are tied, so the ends of a pipeline form another group."""
    programs = recorded(layout, 3, "mixtral" if "ep2" in layout else "llama", tied=True)
    assert_finishes(programs)
    # With ZeRO-3, gradients are reduced while messages of a pipeline are in flight.
    assert max(map(most_in_flight, programs)) <= (4 if "zero3" in layout else 3)


def time_of(costs: Costs, event: Event) -> float:
    """Return the time of an event. The loops name no stage: their computations are F and B."""
    if not isinstance(event, Compute):
        return 0.0
    return costs.of(parse_action(f"0{event.action}0" if event.action in "FB" else event.action))


def until_evaluation(program: Program) -> Program:
    """Return the part of a program before its metrics, which are followed by the evaluation."""
    metrics = (i for i, event in enumerate(program) if isinstance(event, Operation) and "metrics" in event.call_site)
    return program[: next(metrics)]
