"""What is drawn is what was simulated or measured: as text, SVG, PNG, trace and page, and on the command line."""

import itertools
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from picotron.errors import UserError
from picotron.pipeline_parallel import draw
from picotron.schedules.actions import Action
from picotron.schedules.draw_svg import COLOURS, LEFT, as_page, as_svg, boxes, lighter
from picotron.schedules.schedule_csv import read_csv
from picotron.schedules.schedules import SCHEDULES, build, forward_only
from picotron.schedules.simulate import Costs, Span, Timeline, simulate
from picotron.schedules.trace import read_trace, trace_line, trace_path

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, pp: int = 3, microbatches: int = 5) -> Timeline:
    return simulate(build(name, pp, microbatches))


def parts_of(timeline: Timeline) -> int:
    return sum(len(span.action.parts) for spans in timeline.spans for span in spans)


def write_trace(run_dir: Path, step: int, timeline: Timeline) -> None:
    """Lines of all ranks in no order, as ranks write them."""
    lines = [trace_line(rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    trace_path(run_dir, step).write_text("\n".join(reversed(lines)) + "\n")


# ----------------------------------------------------------------------------------------------------------- text


def test_text() -> None:
    assert draw.as_text(timeline_of("1f1b", 3, 4)).splitlines() == [
        "rank 0  0F0 0F1 0F2 ................0B0---- 0F3 0B1---- ....0B2---- ....0B3----",
        "rank 1  ....1F0 1F1 ........1B0---- 1F2 1B1---- 1F3 1B2---- ....1B3---- ........",
        "rank 2  ........2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- ................",
    ]


def test_text_in_a_narrow_terminal() -> None:
    """One letter per action; small ones are the other chunk's, X is an overlapped pair."""
    assert draw.as_text(timeline_of("dualpipev", 2, 4), width=60).splitlines() == [
        "rank 0  FFFfiwfX--.x--b-.x--b-IWIW",
        "rank 1  .FfFfFb-x--X--x--b-B-.iIwW",
    ]
    # narrower than one column for each F: every line is still as wide as it is long
    wide = draw.as_text(timeline_of("1f1b", 4, 32), width=50).splitlines()
    assert all(len(line) <= 50 + len("rank 0  ") for line in wide)


def test_text_of_what_takes_no_time() -> None:
    """Messages are left out, and so is an action of a stage without layers."""
    spans = [Span(Action("F", 0), 0.0, 1.0), Span(Action("SEND_F", 0), 1.0, 1.5), Span(Action("B", 0), 2.0, 2.0)]
    assert draw.as_text(Timeline([spans, []])).splitlines() == ["rank 0  0F0 ....", "rank 1  ........"]


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_rectangle_for_every_action(name: str) -> None:
    timeline = timeline_of(name)
    root = ElementTree.fromstring(as_svg(timeline, width=1000))
    rectangles = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "action"]
    assert len(rectangles) == parts_of(timeline) == 2 * 5 * 3 * SCHEDULES[name].chunks + splits(timeline)
    scale = (1000 - LEFT) / timeline.step_time
    expected = [
        (f"{action}, rank {rank}, {start:.6g} to {end:.6g}", LEFT + start * scale, (end - start) * scale)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
        for _ in action.parts
    ]
    for rectangle, (title, x, width) in zip(rectangles, expected, strict=True):
        assert rectangle.findtext(f"{SVG}title") == title
        assert float(rectangle.get("x", "")) == pytest.approx(x, abs=0.01)
        assert float(rectangle.get("width", "")) == pytest.approx(width, abs=0.01)


def splits(timeline: Timeline) -> int:
    return sum(part.kind == "W" for spans in timeline.spans for span in spans for part in span.action.parts)


def test_boxes_of_a_rank_do_not_lie_on_each_other() -> None:
    timeline = timeline_of("dualpipev", 3, 8)
    for one, other in itertools.combinations(boxes(timeline), 2):
        same_time = min(one.end, other.end) - max(one.start, other.start) > 1e-9
        same_place = min(one.top + one.height, other.top + other.height) - max(one.top, other.top) > 1e-9
        assert not (one.rank == other.rank and same_time and same_place)


def test_colours() -> None:
    """A kind has a colour, a later chunk a lighter one; messages are grey and low."""
    timeline = simulate(forward_only(1, 1, chunks=2))
    assert [box.colour for box in boxes(timeline)] == [COLOURS["F"], lighter(COLOURS["F"], 0.5)]
    assert (lighter("#102030", 0), lighter("#102030", 1)) == ("#102030", "#ffffff")
    message = boxes(Timeline([[Span(Action("SEND_F", 0), 0.0, 1.0)]]))[0]
    assert (message.top, message.height, message.label) == (0.75, 0.25, "")


def test_png(tmp_path: Path) -> None:
    timeline = timeline_of("dualpipev", 2, 5)
    figure = draw.as_figure(timeline, "a title")
    (axes,) = figure.axes
    assert len(axes.patches) == parts_of(timeline)
    for patch, box in zip(axes.patches, boxes(timeline), strict=True):
        assert (patch.get_x(), patch.get_y()) == (box.start, box.rank + box.top)
        assert (patch.get_width(), patch.get_height()) == pytest.approx((box.end - box.start, box.height))
    assert axes.get_title() == "a title"
    draw.write({"a title": timeline}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        UserError, match=r"a \.png needs matplotlib: pip install matplotlib; \.svg and \.html need nothing"
    ):
        draw.as_figure(timeline_of("1f1b"), "")


def test_page() -> None:
    """Valid XML, a picture per schedule, all on one scale, figures and a legend; nothing is loaded from outside."""
    timelines = {f"{name} <&>": timeline_of(name) for name in SCHEDULES}
    page = as_page("All & everything", timelines)
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert [h.text for h in root.iter("h2")] == list(timelines)
    pictures = list(root.iter(f"{SVG}svg"))
    longest = max(timeline.step_time for timeline in timelines.values())
    for picture, timeline in zip(pictures, timelines.values(), strict=True):
        found = [r for r in picture.iter(f"{SVG}rect") if r.get("class") == "action"]
        assert len(found) == parts_of(timeline)
        ends = [float(r.get("x", "")) + float(r.get("width", "")) for r in found]
        assert max(ends) == pytest.approx(LEFT + (960 - LEFT) * timeline.step_time / longest, abs=0.02)
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert rows[0] == [None, "step time", "bubble", "peak activations by rank"]
    assert rows[2] == ["1f1b <&>", "21", "28.6%", "3 2 1"]
    legend = [span.text for span in root.iter("span")]
    assert legend == ["F forward", "B backward", "I backward for the input", "W backward for the weights"]
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=|url\(|<script|@import", page)
    assert len(page) < 300_000


# ---------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_chrome_trace(name: str) -> None:
    timeline = timeline_of(name, 2, 5)
    events = json.loads(draw.as_trace(timeline))["traceEvents"]
    found = [(e["tid"] // 2, e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    assert found == [(rank, str(a), s, e) for rank, spans in enumerate(timeline.spans) for a, s, e in spans]
    assert {e["cat"] for e in events if e["ph"] == "X"} <= {"F", "B", "I", "W", "overlapped"}
    assert {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"} == {
        0: "rank 0", 1: "rank 0 messages", 2: "rank 1", 3: "rank 1 messages",
    }  # fmt: skip


def test_messages_have_a_line_of_their_own() -> None:
    """Events of one line of a trace must not overlap unless one contains the other."""
    spans = [Span(Action("F", 0), 0.0, 1.0), Span(Action("RECV_B", 0), 0.5, 2.0), Span(Action("R", 0), 2.0, 3.0)]
    events = json.loads(draw.as_trace(Timeline([spans])))["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [0, 1, 1]


def test_a_measured_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    old, new = (simulate(build("dualpipev", 3, m), Costs(F=0.0123456789, p2p=0.001)) for m in (4, 7))
    write_trace(tmp_path, 99, old)
    write_trace(tmp_path, 100, new)
    assert read_trace(tmp_path) == (100, new)
    assert read_trace(tmp_path, 99) == (99, old)
    assert trace_path(tmp_path, 99).name == "trace_step_00000099.jsonl"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is not whole: it has ranks \[\]; expected 0, 1, \.\.\."),
        ('{"rank": 1, "action": "0F0", "start": 0, "end": 1}', r"is not whole: it has ranks \[1\]"),
        ("nonsense", "is no trace: line 1 is 'nonsense'; expected"),
        ("[]", r"line 1 is '\[\]'; expected"),
        ('{"rank": 0, "action": "0X0", "start": 0, "end": 1}', "line 1 is .*0X0.*; expected"),
        ('{"rank": 0, "action": "0F0", "start": 0}', "line 1 is"),
        ('{"rank": 0, "action": "0F0", "start": "soon", "end": 1}', "line 1 is"),
        ('{"rank": 0, "action": "0F0", "start": 2, "end": 1}', "line 1 is"),
        ('{"rank": 0, "action": "0F0", "start": NaN, "end": 1}', "line 1 is"),
    ],
)
def test_traces_that_are_refused(content: str, message: str, tmp_path: Path) -> None:
    trace_path(tmp_path, 5).write_text(content)
    with pytest.raises(UserError, match=message):
        read_trace(tmp_path)


def test_traces_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no traces, which are named trace_step_00000005\.jsonl"):
        read_trace(tmp_path)
    write_trace(tmp_path, 3, timeline_of("1f1b"))
    with pytest.raises(UserError, match=r"has no trace of step 4; choose one of \[3\]"):
        read_trace(tmp_path, 4)


# ------------------------------------------------------------------------------------------------- command line


def run(*arguments: object) -> None:
    draw.main([str(argument) for argument in arguments])


def test_text_in_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run("--schedule", "zb_h1", "--pp", 2, "--microbatches", 2)
    assert capsys.readouterr().out.splitlines() == [
        "zb_h1, pp=2, microbatches=2, chunks=1",
        "rank 0  0F0 0F1 ....0I0 0W0 0I1 0W1",
        "rank 1  ....1F0 1I0 1F1 1I1 1W0 1W1",
        "step time 7, bubble 14.3%, peak activations by rank 2 2",
        "",
    ]


def test_a_schedule_in_every_format(tmp_path: Path) -> None:
    timeline = simulate(build("zbv", 3, 4), Costs(weights=[0.5] * 6, p2p=0.25))
    for suffix, expected in (
        ("svg", as_svg(timeline)),
        ("json", draw.as_trace(timeline)),
        ("html", as_page("Pipeline schedules", {"zbv, pp=3, microbatches=4, chunks=2": timeline})),
    ):
        run("--schedule", "zbv", "--pp", 3, "--microbatches", 4, "--p2p", 0.25, "--out", tmp_path / f"out.{suffix}")
        assert (tmp_path / f"out.{suffix}").read_text() == expected
    run("--schedule", "zbv", "--pp", 3, "--microbatches", 4, "--out", tmp_path / "out.csv")
    assert [list(program) for program in read_csv(tmp_path / "out.csv").programs] == timeline.programs


def test_all_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--all", "--pp", 2, "--microbatches", 3, "--chunks", 3, "--out", tmp_path / "out.html")
    root = ElementTree.fromstring((tmp_path / "out.html").read_text().removeprefix("<!doctype html>"))
    assert [(h.text or "").split(",")[0] for h in root.iter("h2")] == list(SCHEDULES)
    assert [(h.text or "")[-1] for h in root.iter("h2")] == ["1", "1", "3", "3", "1", "2", "2"]
    run("--all")
    assert capsys.readouterr().out.count("bubble") == len(SCHEDULES)


def test_a_file_and_a_measured_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n")
    run("--csv", tmp_path / "own.csv")
    assert "own.csv, pp=2, microbatches=1, chunks=1\nrank 0  0F0 ............0B0----\n" in capsys.readouterr().out
    write_trace(tmp_path, 7, timeline_of("1f1b", 2, 2))
    run("--measured", tmp_path)
    assert f"{tmp_path}, step 7, in seconds\nrank 0  0F0 0F1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "gpipe"], "error: there is no schedule 'gpipe'; choose one of afab, "),
        (["--schedule", "zbv", "--chunks", "3"], r"error: zbv has 2 chunk\(s\) per rank, not 3"),
        (["--csv", "nowhere.csv"], "error: cannot read the schedule 'nowhere.csv'"),
        (["--measured", "nowhere"], "error: 'nowhere' has no traces"),
        (["--out", "a.gif"], r"error: --out a\.gif should end in \.png, \.svg, \.html, \.json .* or \.csv"),
        (["--all", "--out", "a.svg"], r"error: --out a\.svg can hold one schedule; all of them go to an \.html file"),
        (["--out", "nowhere/a.svg"], r"error: cannot write --out nowhere/a\.svg: No such file"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(*arguments)
