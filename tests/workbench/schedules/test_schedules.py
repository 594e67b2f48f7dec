"""Schedules: their order of actions matches torch's, and every schedule can run."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.torch_schedules import CLASSES, torch_schedule
from picotron.config import PP_ENGINES
from picotron.console import UserError
from tests.support.oracle import make_config
from workbench.schedules.actions import Action, AnyAction, Schedule, parse_action
from workbench.schedules.checker import add_communication
from workbench.schedules.nccl_step import simulate_nccl
from workbench.schedules.schedules import LOOPS, SCHEDULES, build
from workbench.schedules.simulate import Costs, computes


def test_names_of_the_config_are_those_of_the_schedules() -> None:
    assert (*SCHEDULES, "auto") == PP_ENGINES
    configs = {name: make_config(f"pp2 {name}") for name in PP_ENGINES}
    plain = [name for name, config in configs.items() if not config.needs_workbench]
    assert tuple(plain) == LOOPS


def names(program: list[AnyAction]) -> list[str]:
    return [str(action) for action in program]


# ------------------------------------------------------------------------------------------- the order of actions


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1", "dualpipev"])
def test_order_matches_torch(name: str) -> None:
    recipe, micro_batches = SCHEDULES[name], (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
    for pp, m, chunks in itertools.product((2, 3, 4, 8), micro_batches, (1, 2, 3, 4) if recipe.any_chunks else (2,)):
        rounds = max(1, m // pp)
        if m % rounds or (m < 2 * pp and not recipe.has_groups):
            continue  # torch rejects these numbers
        schedule = build(name, pp, m, chunks, m // rounds if recipe.has_groups else None)
        theirs = torch_schedule(CLASSES[name], pp, m, chunks).pipeline_order
        for rank, program in enumerate(schedule.programs):
            expected = [str(parse_action(str(action))) for action in theirs[rank] if action is not None]
            assert names(program) == expected, (pp, m, chunks, rank)


@pytest.mark.parametrize("text", ["", "2F", "2X0", "2F-1", "(2B3;1F0)", "(2F3;1B0", "2R0"])
def test_other_texts_are_no_actions(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


# --------------------------------------------------------------------------------------------- every schedule runs


def assert_runs(schedule: Schedule) -> None:
    """Assert that the schedule runs where nothing is buffered and all messages of a rank wait in one line, that they
    change no computation, and that each stage is reduced once, after its last backward.
    """
    simulate_nccl(schedule, Costs(), communicators="one")
    for rank, program in enumerate(add_communication(schedule)):
        assert list(filter(computes, program)) == list(schedule.programs[rank])
        reduced = [a.parts[0].stage for a in program if a.parts[0].kind == "R"]
        assert sorted(reduced) == ([] if schedule.forward_only else schedule.stages_of(rank))
        for stage in reduced:
            after = program[program.index(Action("R", stage)) :]
            assert not any(part.stage == stage and part.kind in ("B", "W") for a in after for part in a.parts)


small = {"pp": st.integers(1, 8), "micro_batches": st.integers(1, 32)}


@settings(max_examples=150)
@given(name=st.sampled_from(list(SCHEDULES)), chunks=st.none() | st.integers(1, 4), **small)
def test_built_schedule_runs_or_its_chunks_are_rejected(
    name: str, pp: int, micro_batches: int, chunks: int | None
) -> None:
    fixed = chunks is not None and chunks != SCHEDULES[name].chunks and not SCHEDULES[name].any_chunks
    if fixed:
        with pytest.raises(UserError, match=rf"{name} has . chunk\(s\) per pp rank, not {chunks}"):
            build(name, pp, micro_batches, chunks)
    else:
        assert_runs(build(name, pp, micro_batches, chunks))
