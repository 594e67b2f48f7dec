"""Times of a recorded step: those of its actions and messages, without what the clocks of ranks differ."""

from pathlib import Path

import pytest

from tests.workbench.drawing.test_draw import write_trace
from workbench.schedules.actions import Action
from workbench.schedules.schedules import build
from workbench.schedules.simulate import Costs, Timeline, simulate
from workbench.schedules.trace import recorded_costs


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_recorded_costs_are_those_of_the_recorded_step(name: str, tmp_path: Path) -> None:
    """B is I + W, and each half of a B that was not split half of it. The clock of a rank can be late."""
    schedule = build(name, 3, 7)
    costs = Costs(F=1.1, B=2.2, I=1.3, W=0.9, p2p=0.25, weights=[1 + 0.1 * s for s in range(schedule.num_stages)])
    timeline = simulate(schedule, costs)
    late = [
        [span._replace(start=span.start + rank, end=span.end + rank) for span in spans]
        for rank, spans in enumerate(timeline.spans)
    ]
    write_trace(tmp_path, 4, Timeline(late))
    recorded, found = recorded_costs(tmp_path)
    assert (recorded.pp, recorded.chunks, recorded.placement) == (3, schedule.chunks, schedule.placement)
    assert found.p2p == pytest.approx(0.25)
    for stage in range(schedule.num_stages):
        for kind in "FBIW":
            halved = kind in "IW" and name == "1f1b"
            expected = costs.of(Action("B", stage)) / 2 if halved else costs.of(Action(kind, stage))
            assert found.of(Action(kind, stage)) == pytest.approx(expected)
