"""The schedule of generation: complete, without deadlock, and with the expected idle time."""

from itertools import islice
from typing import Any

import pytest

from picotron.console import UserError
from picotron.drawing.__main__ import main
from picotron.schedules.checker import check
from picotron.schedules.generation import generation
from picotron.schedules.simulate import Costs, simulate

LAYOUTS = [(1, 1, "loop"), (2, 1, "loop"), (3, 1, "loop"), (2, 3, "loop"), (4, 2, "loop"), (3, 2, "V"), (4, 4, "V")]


@pytest.mark.parametrize(("pp", "chunks", "placement"), LAYOUTS)
def test_the_input_of_an_action_comes_from_the_tick_before(pp: int, chunks: int, placement: Any) -> None:
    """So with as many groups as ranks, all ranks exchange their results after each tick. In a loop, none is idle
    between its first and its last action.
    """
    schedule = generation(pp, pp, 5, chunks, placement)
    timeline = check(schedule)
    length = int(timeline.step_time)
    tick_of = {}
    for rank in range(pp):
        ticks = list(islice(schedule.ticks(rank), length))
        tick_of |= {action: tick for tick, action in enumerate(ticks) if action in timeline.programs[rank]}
        assert placement == "V" or ticks[rank : rank + 5 * pp * chunks] == schedule.programs[rank]
    assert tick_of.keys() == {action for program in schedule.programs for action in program}
    for action, tick in tick_of.items():
        source = schedule.source(action)
        assert source is None or tick_of[source] == tick - 1
    for span in (span for spans in timeline.spans for span in spans):
        assert span.start <= tick_of[span.action]  # in a V, later groups could start earlier


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2])
def test_bubble_follows_the_formula(pp: int, chunks: int) -> None:
    rounds = 6
    for groups in (pp, pp + 1, 2 * pp):
        timeline = check(generation(pp, groups, rounds, chunks))
        work = rounds * groups * chunks
        assert timeline.bubble == pytest.approx((pp - 1) / (work + pp - 1))
    for groups in range(1, pp):
        timeline = check(generation(pp, groups, rounds, chunks))
        assert timeline.step_time == rounds * chunks * pp + groups - 1
        assert timeline.bubble == pytest.approx(1 - rounds * groups * chunks / timeline.step_time)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("pp", "chunks", "placement"), LAYOUTS)
def test_any_number_of_groups_can_run(pp: int, chunks: int, placement: Any, groups: int) -> None:
    """`check` raises an error for a missing action and for a deadlock."""
    timeline = check(generation(pp, groups, 4, chunks, placement))
    assert timeline.step_time >= 4 * chunks * max(pp, groups)


def test_messages_delay_a_round() -> None:
    timeline = check(generation(4, 4, 1))
    assert timeline.step_time == 7
    assert simulate(generation(4, 4, 3), Costs(p2p=0.5)).step_time == pytest.approx(2 * (4 + 4 * 0.5) + 7 + 3 * 0.5)


def test_numbers_that_do_not_work_are_errors() -> None:
    with pytest.raises(UserError, match=r"an even number of chunks, .* not 3; use another pp_engine"):
        generation(2, 2, 1, 3, "V")
    with pytest.raises(
        UserError, match=r"pp=2, groups=0, rounds=1 and chunks=1 must each be at least 1, .* most 262,144"
    ):
        generation(2, 0, 1)
    with pytest.raises(UserError, match="must each be at least 1, and their product at most 262,144"):
        generation(2, 2, 2**18)


def test_draw_prints_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generation", "--pp", "2", "--tokens", "3"])
    title, *lines, facts, _ = capsys.readouterr().out.splitlines()
    assert title == "generation, pp=2, groups=2, tokens=3, chunks=1"
    assert lines[:2] == ["pp 0  0F0 0F1 0F2 0F3 0F4 0F5 ....", "pp 1  ....1F0 1F1 1F2 1F3 1F4 1F5"]
    assert facts.startswith("step time 7, bubble 14.3%")
    main(["generation", "--pp", "2", "--groups", "2", "--chunks", "2"])
    assert "step time 8.5, bubble 5.9%" in capsys.readouterr().out  # a stage takes half as long
