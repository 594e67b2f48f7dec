"""Drawings show the simulated timeline; traces of recorded steps are read as they were written."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from picotron.console import UserError
from workbench.drawing import __main__ as drawing
from workbench.drawing.draw_svg import LEFT, WIDTH, as_svg
from workbench.schedules.schedule_csv import read_csv
from workbench.schedules.schedules import build
from workbench.schedules.simulate import Costs, Timeline, simulate
from workbench.schedules.trace import read_trace, trace_line, trace_path

SVG = "{http://www.w3.org/2000/svg}"


def write_trace(run_dir: Path, step: int, timeline: Timeline) -> None:
    """Write the lines of all ranks out of order, as concurrent ranks can."""
    lines = [trace_line(rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    trace_path(run_dir, step).write_text("\n".join(reversed(lines)) + "\n")


def test_svg_has_a_rectangle_for_every_action() -> None:
    timeline = simulate(build("dualpipev", 3, 5))
    root = ElementTree.fromstring(as_svg(timeline))
    scale = (WIDTH - LEFT - 12) / timeline.step_time
    expected = [
        (f"{action}, pp rank {rank}, {start:.6g} to {end:.6g}", LEFT + start * scale, (end - start) * scale)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
        for _ in action.parts
    ]
    titles = ((each, each.findtext(f"{SVG}title", "")) for each in root.iter(f"{SVG}rect"))
    rectangles = [(each, title) for each, title in titles if "pp rank" in title]  # others are of the legend
    for (rectangle, found), (title, x, width) in zip(rectangles, expected, strict=True):
        assert found == title
        assert float(rectangle.get("x", "")) == pytest.approx(x, abs=0.01)
        assert float(rectangle.get("width", "")) == pytest.approx(width, abs=0.01)


def test_trace_round_trip_keeps_the_timeline(tmp_path: Path) -> None:
    old, new = (simulate(build("dualpipev", 3, m), Costs(F=0.0123456789, p2p=0.001)) for m in (4, 7))
    write_trace(tmp_path, 99, old)
    write_trace(tmp_path, 100, new)
    assert read_trace(tmp_path) == (100, new)
    assert read_trace(tmp_path, 99) == (99, old)
    with pytest.raises(UserError, match=r"step 4; .*\[99, 100\]"):
        read_trace(tmp_path, 4)
    with pytest.raises(UserError, match="trace_steps"):
        read_trace(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"rank": 1, "action": "0F0", "start": 0, "end": 1}', r"incomplete: .*\[1\]"),
        ('{"rank": 0, "action": "0F0", "start": NaN, "end": 1}', "line 1"),
    ],
)
def test_malformed_traces_are_refused(content: str, part: str, tmp_path: Path) -> None:
    trace_path(tmp_path, 5).write_text(content)
    with pytest.raises(UserError, match=part):
        read_trace(tmp_path)


def test_draw_writes_pictures_and_schedules(tmp_path: Path) -> None:
    timeline = simulate(build("zbv", 3, 4), Costs(weights=[0.5] * 6, p2p=0.25))
    words = ["schedule", "zbv", "--pp", "3", "--micro_batches", "4", "--p2p", "0.25", "--out"]
    for suffix in ("svg", "csv"):
        drawing.main([*words, str(tmp_path / f"out.{suffix}")])
    assert (tmp_path / "out.svg").read_text() == as_svg(timeline)
    assert [list(program) for program in read_csv(tmp_path / "out.csv").programs] == timeline.programs
