"""Drawings show the simulated or measured timeline as text, picture, page and trace, and on the command line."""

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from picotron.console import UserError
from picotron.drawing import __main__ as drawing
from picotron.drawing.draw import as_trace
from picotron.drawing.draw_svg import COLOURS, CURVE, LEFT, as_page, as_svg, boxes, lighter
from picotron.drawing.draw_text import as_text
from picotron.schedules.actions import Action
from picotron.schedules.schedule_csv import read_csv
from picotron.schedules.schedules import SCHEDULES, build, forward_only
from picotron.schedules.simulate import Costs, Span, Timeline, peak_activations, simulate
from picotron.schedules.trace import read_trace, trace_line, trace_path

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, pp: int = 3, micro_batches: int = 5) -> Timeline:
    return simulate(build(name, pp, micro_batches))


def write_trace(run_dir: Path, step: int, timeline: Timeline) -> None:
    """Write the lines of all ranks out of order, as concurrent ranks can."""
    lines = [trace_line(rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    trace_path(run_dir, step).write_text("\n".join(reversed(lines)) + "\n")


def run(*arguments: object) -> None:
    drawing.main([str(argument) for argument in arguments])


# ----------------------------------------------------------------------------------------------------------- text


def test_text_shows_names_if_they_fit() -> None:
    assert as_text(timeline_of("1f1b", 3, 4)).splitlines()[:-1] == [
        "pp 0  0F0 0F1 0F2 ................0B0---- 0F3 0B1---- ....0B2---- ....0B3----",
        "      ▃▃▃▃▆▆▆▆████████████████████████████████████████▆▆▆▆▆▆▆▆▆▆▆▆▃▃▃▃▃▃▃▃▃▃▃",
        "pp 1  ....1F0 1F1 ........1B0---- 1F2 1B1---- 1F3 1B2---- ....1B3---- ........",
        "          ▃▃▃▃▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▃▃▃▃▃▃▃▃▃▃▃▃",
        "pp 2  ........2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- ................",
        "              ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃",
        "time  0                   5                   10                  15",
    ]


def test_narrow_text_shows_letters() -> None:
    """Lower case is the second chunk, and X an overlapped pair."""
    assert as_text(timeline_of("dualpipev", 2, 4), width=60).splitlines()[:4:2] == [
        "pp 0  FFFfiwfX--.x--b-.x--b-IWIW",
        "pp 1  .FfFfFb-x--X--x--b-B-.iIwW",
    ]
    narrow = as_text(timeline_of("1f1b", 4, 32), width=50).splitlines()  # less than one column for each F
    assert all(len(line) <= 50 + len("pp 0  ") for line in narrow[:-1])


def test_text_omits_messages_and_actions_that_take_no_time() -> None:
    """An action of a stage without layers takes no time."""
    spans = [Span(Action("F", 0), 0.0, 1.0), Span(Action("SEND_F", 0), 1.0, 1.5), Span(Action("B", 0), 2.0, 2.0)]
    assert as_text(Timeline([spans, []])).splitlines()[:3] == ["pp 0  0F0 ....", "      ████████", "pp 1  ........"]


# ------------------------------------------------------------------------------------------------- pictures and pages


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_svg_has_a_rectangle_for_every_action_and_a_memory_curve(name: str) -> None:
    timeline = timeline_of(name)
    root = ElementTree.fromstring(as_svg(timeline, width=1000))
    scale = (1000 - LEFT - 12) / timeline.step_time
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
    peaks = [peak_activations(program) / SCHEDULES[name].chunks for program in timeline.programs]
    for peak, polygon in zip(peaks, root.iter(f"{SVG}polygon"), strict=True):
        heights = [float(point.split(",")[1]) for point in polygon.get("points", "").split()]
        assert max(heights) - min(heights) == pytest.approx(CURVE * peak / max(peaks), abs=0.02)
    for number in (each for each in root.iter(f"{SVG}text") if each.get("class") == "centred"):
        assert float(number.get("x", "")) == pytest.approx(LEFT + scale * float(number.text or ""), abs=0.02)


def test_boxes_show_kind_and_chunk_and_do_not_overlap() -> None:
    """A later chunk is lighter. Messages are low and have no label."""
    for one, other in itertools.combinations(boxes(timeline_of("dualpipev", 3, 8)), 2):
        same_time = min(one.end, other.end) - max(one.start, other.start) > 1e-9
        same_place = min(one.top + one.height, other.top + other.height) - max(one.top, other.top) > 1e-9
        assert not (one.rank == other.rank and same_time and same_place)
    two = boxes(simulate(forward_only(1, 1, chunks=2)))
    assert [box.colour for box in two] == [COLOURS["F"], lighter(COLOURS["F"], 0.5)]
    message = boxes(Timeline([[Span(Action("SEND_F", 0), 0.0, 1.0)]]))[0]
    assert (message.top, message.height, message.label) == (0.75, 0.25, "")


def test_page_has_pictures_on_one_time_axis_and_a_summary() -> None:
    """The page is valid XML, and loads nothing from elsewhere."""
    timelines = {f"{name} <&>": timeline_of(name) for name in SCHEDULES}
    page = as_page("All & everything", timelines)
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert [h.text for h in root.iter("h2")] == list(timelines)
    longest = max(timeline.step_time for timeline in timelines.values())
    for picture, timeline in zip(root.iter(f"{SVG}svg"), timelines.values(), strict=True):
        found = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == "action"]
        ends = [float(each.get("x", "")) + float(each.get("width", "")) for each in found]
        assert max(ends) == pytest.approx(LEFT + (960 - LEFT - 12) * timeline.step_time / longest, abs=0.02)
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert ["1f1b <&>", "21", "28.6%", "3 2 1"] in rows
    assert not re.search(r"(src|href)=|url\(|<script|@import", page)


# ---------------------------------------------------------------------------------------------------------- traces


def test_chrome_trace_has_an_event_for_every_action() -> None:
    timeline = timeline_of("dualpipev", 2, 5)
    events = json.loads(as_trace(timeline))["traceEvents"]
    found = [(e["tid"] // 2, e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    assert found == [(rank, str(a), s, e) for rank, spans in enumerate(timeline.spans) for a, s, e in spans]


def test_messages_and_reductions_have_a_separate_line_in_a_trace() -> None:
    """Events on one line of a trace must not overlap unless one contains the other."""
    spans = [Span(Action("F", 0), 0.0, 1.0), Span(Action("RECV_B", 0), 0.5, 2.0), Span(Action("R", 0), 2.0, 3.0)]
    events = json.loads(as_trace(Timeline([spans])))["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [0, 1, 1]


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
        ("", "incomplete"),
        ('{"rank": 1, "action": "0F0", "start": 0, "end": 1}', r"incomplete: .*\[1\]"),
        ('{"rank": 1e999, "action": "0F0", "start": 0, "end": 1}', "line 1"),
        ('{"rank": 0, "action": "0R", "start": 0, "end": 1}', "no forward or backward"),
        ("nonsense", "line 1 is 'nonsense'"),
        ("[]", r"line 1 is '\[\]'"),
        ('{"rank": 0, "action": "0X0", "start": 0, "end": 1}', "0X0"),
        ('{"rank": 0, "action": "0F0", "start": "soon", "end": 1}', "line 1"),
        ('{"rank": 0, "action": "0F0", "start": 2, "end": 1}', "line 1"),
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


def test_draw_prints_all_schedules_files_and_measured_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("all")
    assert capsys.readouterr().out.count("bubble") == len(SCHEDULES)
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n")
    run("csv", tmp_path / "own.csv")
    assert "own.csv, pp=2, micro_batches=1, chunks=1\npp 0  0F0 " in capsys.readouterr().out
    write_trace(tmp_path, 7, timeline_of("1f1b", 2, 2))
    run("measured", tmp_path)
    assert f"{tmp_path}, step 7, in seconds\npp 0  0F0 0F1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("schedule zb_h1 --pp 2 --micro_batches 4 --activations 10 30 --deferred 0.5", "by pp rank 20 45"),
        ("schedule afab --pp 2 --micro_batches 4 --transfer 2 --p2p 0.5", "step time 35"),
        # with W keeping more than a forward, full backwards
        ("search --pp 2 --micro_batches 4 --memory 1 --deferred 3 --chunks 1", "peak activations by pp rank 1 1"),
    ],
)
def test_options_change_the_result(arguments: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(*arguments.split())
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("schedule 1f1b --activations 1 2", "--activations has 2 sizes"),
        ("csv nowhere.csv", "'nowhere.csv'"),
        ("schedule 1f1b --out a.gif", r"--out a\.gif"),
        ("all --out a.svg", r"--out a\.svg"),
        ("schedule 1f1b --out nowhere/a.svg", r"--out nowhere/a\.svg"),
        ("schedule gpipe", "'gpipe'"),
        ("schedule 1f1b --memory 2", "--memory 2"),  # an option without effect
        ("csv x.csv --pp 8", "--pp 8"),
        ("schedule 1f1b --p2p 1e308", "--p2p: '1e308'"),
        ("search", "required: --memory"),
        ("search --memory 2 --chunks 1 --activations 1 2", "--activations: not allowed with argument --chunks"),
    ],
)
def test_wrong_arguments_are_named(arguments: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*arguments.split())
    assert re.search(part, f"{exit.value}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("command", drawing.COMMANDS)
def test_help_of_a_command_has_an_example_that_is_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    example = re.search(rf"python -m picotron\.drawing ({command} .*)", capsys.readouterr().out.partition("\n\n")[2])
    assert example
    drawing.make_parser().parse_args(example[1].split())
