"""The schedule of generation: complete, without deadlock, and without idle time."""

from itertools import islice
from typing import Any

import pytest

from workbench.schedules.checker import check
from workbench.schedules.generation import generation


@pytest.mark.parametrize(
    ("pp", "chunks", "placement"), [(1, 1, "loop"), (3, 1, "loop"), (2, 3, "loop"), (3, 2, "V"), (4, 4, "V")]
)
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
