"""Drawings show the simulated or measured timeline as text, picture, page and trace, and on the command line."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from picotron.console import UserError
from workbench.drawing import __main__ as drawing
from workbench.drawing.draw import as_trace
from workbench.drawing.draw_svg import LEFT, WIDTH, as_page, as_svg
from workbench.schedules.schedule_csv import read_csv
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.simulate import Costs, Timeline, simulate
from workbench.schedules.trace import read_trace, trace_line, trace_path

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, pp: int = 3, micro_batches: int = 5) -> Timeline:
    return simulate(build(name, pp, micro_batches))


def write_trace(run_dir: Path, step: int, timeline: Timeline) -> None:
    """Write the lines of all ranks out of order, as concurrent ranks can."""
    lines = [trace_line(rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    trace_path(run_dir, step).write_text("\n".join(reversed(lines)) + "\n")


def run(*arguments: object) -> None:
    drawing.main([str(argument) for argument in arguments])


# ------------------------------------------------------------------------------------------------- pictures and pages


def test_svg_has_a_rectangle_for_every_action() -> None:
    timeline = timeline_of("dualpipev")
    root = ElementTree.fromstring(as_svg(timeline, with_legend=False))
    scale = (WIDTH - LEFT - 12) / timeline.step_time
    expected = [
        (f"{action}, pp rank {rank}, {start:.6g} to {end:.6g}", LEFT + start * scale, (end - start) * scale)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
        for _ in action.parts
    ]
    rectangles = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "action"]
    for rectangle, (title, x, width) in zip(rectangles, expected, strict=True):
        assert rectangle.findtext(f"{SVG}title") == title
        assert float(rectangle.get("x", "")) == pytest.approx(x, abs=0.01)
        assert float(rectangle.get("width", "")) == pytest.approx(width, abs=0.01)


# ---------------------------------------------------------------------------------------------------------- traces


def test_chrome_trace_has_an_event_for_every_action() -> None:
    timeline = timeline_of("dualpipev", 2, 5)
    events = json.loads(as_trace(timeline))["traceEvents"]
    found = [(e["tid"] // 2, e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    assert found == [(rank, str(a), s, e) for rank, spans in enumerate(timeline.spans) for a, s, e in spans]


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


# ------------------------------------------------------------------------------------------------- command line


def test_draw_writes_every_format(tmp_path: Path) -> None:
    timeline = simulate(build("zbv", 3, 4), Costs(weights=[0.5] * 6, p2p=0.25))
    for suffix, expected in (
        ("svg", as_svg(timeline)),
        ("json", as_trace(timeline)),
        ("html", as_page("Pipeline schedules", {"zbv, pp=3, micro_batches=4, chunks=2": timeline})),
    ):
        run("schedule", "zbv", "--pp", 3, "--micro_batches", 4, "--p2p", 0.25, "--out", tmp_path / f"out.{suffix}")
        assert (tmp_path / f"out.{suffix}").read_text() == expected
    run("schedule", "zbv", "--pp", 3, "--micro_batches", 4, "--out", tmp_path / "out.csv")
    assert [list(program) for program in read_csv(tmp_path / "out.csv").programs] == timeline.programs


def test_draw_prints_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    run("all")
    assert capsys.readouterr().out.count("bubble") == len(SCHEDULES)
