"""Drawings show the simulated or measured timeline as text and trace, and on the command line. See test_draw_svg.py."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from picotron.console import UserError
from picotron.drawing import __main__ as drawing
from picotron.drawing.draw import as_trace
from picotron.drawing.draw_svg import as_page, as_svg
from picotron.drawing.draw_text import as_text
from picotron.schedules.actions import Action
from picotron.schedules.schedule_csv import read_csv
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, Span, Timeline, simulate
from picotron.schedules.trace import read_trace, trace_line, trace_path


def timeline_of(name: str, pp: int = 3, microbatches: int = 5) -> Timeline:
    return simulate(build(name, pp, microbatches))


def write_trace(run_dir: Path, step: int, timeline: Timeline) -> None:
    """Write the lines of all ranks out of order, as concurrent ranks can."""
    lines = [trace_line(rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    trace_path(run_dir, step).write_text("\n".join(reversed(lines)) + "\n")


# ----------------------------------------------------------------------------------------------------------- text


def test_text_shows_names_if_they_fit() -> None:
    assert as_text(timeline_of("1f1b", 3, 4)).splitlines() == [
        "pp 0  0F0 0F1 0F2 ................0B0---- 0F3 0B1---- ....0B2---- ....0B3----",
        "      ▃▃▃▃▆▆▆▆████████████████████████████████████████▆▆▆▆▆▆▆▆▆▆▆▆▃▃▃▃▃▃▃▃▃▃▃",
        "pp 1  ....1F0 1F1 ........1B0---- 1F2 1B1---- 1F3 1B2---- ....1B3---- ........",
        "          ▃▃▃▃▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▃▃▃▃▃▃▃▃▃▃▃▃",
        "pp 2  ........2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- ................",
        "              ▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃",
        "time  0                   5                   10                  15",
        "F forward, B backward, . idle; below each rank its activations, █ = 3 micro-batches",
    ]


def test_narrow_text_shows_letters() -> None:
    """Lower case is the second chunk, and X an overlapped pair."""
    assert as_text(timeline_of("dualpipev", 2, 4), width=60).splitlines()[:4:2] == [
        "pp 0  FFFfiwfX--.x--b-.x--b-IWIW",
        "pp 1  .FfFfFb-x--X--x--b-B-.iIwW",
    ]
    assert as_text(timeline_of("dualpipev", 2, 4), width=60).splitlines()[-1] == (
        "F forward, B backward, I backward for the input, W backward for the weights, X overlapped forward and backward, "
        "lower case every other chunk, . idle; below each rank its activations, █ = 2.5 micro-batches"
    )
    # If there is less than one column for each F, lines still fit the width.
    narrow = as_text(timeline_of("1f1b", 4, 32), width=50).splitlines()
    assert all(len(line) <= 50 + len("pp 0  ") for line in narrow[:-1])
    assert len(narrow) == 4 * 2 + 2


def test_text_omits_messages_and_actions_that_take_no_time() -> None:
    """An action of a stage without layers takes no time."""
    spans = [Span(Action("F", 0), 0.0, 1.0), Span(Action("SEND_F", 0), 1.0, 1.5), Span(Action("B", 0), 2.0, 2.0)]
    assert as_text(Timeline([spans, []])).splitlines()[:3] == [
        "pp 0  0F0 ....",
        "      ████████",
        "pp 1  ........",
    ]


# ---------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_chrome_trace_has_an_event_for_every_action(name: str) -> None:
    timeline = timeline_of(name, 2, 5)
    events = json.loads(as_trace(timeline))["traceEvents"]
    found = [(e["tid"] // 2, e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    assert found == [(rank, str(a), s, e) for rank, spans in enumerate(timeline.spans) for a, s, e in spans]
    assert {e["cat"] for e in events if e["ph"] == "X"} <= {"F", "B", "I", "W", "overlapped"}
    assert {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"} == {
        0: "pp 0", 1: "pp 0 messages", 2: "pp 1", 3: "pp 1 messages",
    }  # fmt: skip


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
    assert trace_path(tmp_path, 99).name == "trace_step_00000099.jsonl"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is incomplete: it has pp ranks \[\]; expected 0, 1, \.\.\."),
        ('{"rank": 1, "action": "0F0", "start": 0, "end": 1}', r"is incomplete: it has pp ranks \[1\]"),
        ('{"rank": 1e999, "action": "0F0", "start": 0, "end": 1}', "is not a valid trace: line 1"),
        ('{"rank": 0, "action": "0R", "start": 0, "end": 1}', "has no forward or backward that takes time"),
        ('{"rank": 0, "action": "0F0", "start": 0, "end": 0}', "has no forward or backward that takes time"),
        ("nonsense", "is not a valid trace: line 1 is 'nonsense'; expected"),
        ("[]", r"line 1 is '\[\]'; expected"),
        ('{"rank": 0, "action": "0X0", "start": 0, "end": 1}', "line 1 is .*0X0.*; expected"),
        ('{"rank": 0, "action": "0F0", "start": 0}', "line 1 is"),
        ('{"rank": 0, "action": "0F0", "start": "soon", "end": 1}', "line 1 is"),
        ('{"rank": 0, "action": "0F0", "start": 2, "end": 1}', "line 1 is"),
        ('{"rank": 0, "action": "0F0", "start": NaN, "end": 1}', "line 1 is"),
    ],
)
def test_read_trace_rejects_malformed_trace(content: str, message: str, tmp_path: Path) -> None:
    trace_path(tmp_path, 5).write_text(content)
    with pytest.raises(UserError, match=message):
        read_trace(tmp_path)


def test_read_trace_rejects_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"has no traces, files like trace_step_00000005\.jsonl; record a step with logging\.trace_steps",
    ):
        read_trace(tmp_path)
    write_trace(tmp_path, 3, timeline_of("1f1b"))
    with pytest.raises(UserError, match=r"has no trace of step 4; choose one of \[3\]"):
        read_trace(tmp_path, 4)


# ------------------------------------------------------------------------------------------------- command line


def run(*arguments: object) -> None:
    drawing.main([str(argument) for argument in arguments])


def test_draw_prints_text_and_summary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run("schedule", "zb_h1", "--pp", 2, "--microbatches", 2)
    assert capsys.readouterr().out.splitlines() == [
        "zb_h1, pp=2, microbatches=2, chunks=1",
        "pp 0  0F0 0F1 ....0I0 0W0 0I1 0W1",
        "      ▄▄▄▄████████████████▄▄▄▄▄▄▄",
        "pp 1  ....1F0 1I0 1F1 1I1 1W0 1W1",
        "          ▄▄▄▄▄▄▄▄████████████▄▄▄",
        "time  0                   5",
        "F forward, I backward for the input, W backward for the weights, . idle; "
        "below each rank its activations, █ = 2 micro-batches",
        "step time 7, bubble 14.3%, peak activations by pp rank 2 2",
        "",
    ]


def test_draw_writes_every_format(tmp_path: Path) -> None:
    timeline = simulate(build("zbv", 3, 4), Costs(weights=[0.5] * 6, p2p=0.25))
    for suffix, expected in (
        ("svg", as_svg(timeline)),
        ("json", as_trace(timeline)),
        ("html", as_page("Pipeline schedules", {"zbv, pp=3, microbatches=4, chunks=2": timeline})),
    ):
        run("schedule", "zbv", "--pp", 3, "--microbatches", 4, "--p2p", 0.25, "--out", tmp_path / f"out.{suffix}")
        assert (tmp_path / f"out.{suffix}").read_text() == expected
    run("schedule", "zbv", "--pp", 3, "--microbatches", 4, "--out", tmp_path / "out.csv")
    assert [list(program) for program in read_csv(tmp_path / "out.csv").programs] == timeline.programs


def test_draw_all_has_every_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("all", "--pp", 2, "--microbatches", 3, "--chunks", 3, "--out", tmp_path / "out.html")
    root = ElementTree.fromstring((tmp_path / "out.html").read_text().removeprefix("<!doctype html>"))
    assert [(h.text or "").split(",")[0] for h in root.iter("h2")] == list(SCHEDULES)
    assert [(h.text or "")[-1] for h in root.iter("h2")] == [
        str(3 if recipe.any_chunks else recipe.chunks) for recipe in SCHEDULES.values()
    ]
    run("all")
    assert capsys.readouterr().out.count("bubble") == len(SCHEDULES)


def test_draw_reads_a_csv_file_and_a_measured_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n")
    run("csv", tmp_path / "own.csv")
    assert (
        "own.csv, pp=2, microbatches=1, chunks=1\npp 0  0F0 ............0B0----\n      ███" in capsys.readouterr().out
    )
    write_trace(tmp_path, 7, timeline_of("1f1b", 2, 2))
    run("measured", tmp_path)
    assert f"{tmp_path}, step 7, in seconds\npp 0  0F0 0F1 " in capsys.readouterr().out


def test_draw_takes_the_activations_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    run("schedule", "zb_h1", "--pp", 2, "--microbatches", 4, "--activations", 10, 30, "--deferred", 0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].endswith("below each rank its activations, █ = 45 in the given unit")
    assert lines[-2] == "step time 13, bubble 7.7%, peak activations by pp rank 20 45"
    run("schedule", "afab", "--pp", 2, "--microbatches", 4, "--transfer", 2, "--p2p", 0.5)
    assert "step time 35" in capsys.readouterr().out


def test_a_search_uses_full_backwards_where_w_keeps_more_than_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    run("search", "--pp", 2, "--microbatches", 4, "--memory", 1, "--deferred", 3, "--chunks", 1)
    printed = capsys.readouterr().out
    assert "B" in printed.splitlines()[1]
    assert "peak activations by pp rank 1 1" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("schedule 1f1b --activations 1 2", "error: --activations has 2 sizes, but there are 4 stages"),
        ("schedule zbv --chunks 3", r"error: zbv has 2 chunk\(s\) per pp rank, not 3"),
        ("csv nowhere.csv", "error: cannot read the schedule 'nowhere.csv'"),
        ("measured nowhere", "error: 'nowhere' has no traces"),
        ("schedule 1f1b --out a.gif", r"error: --out a\.gif must end in \.svg, \.html, \.json .* or \.csv"),
        ("all --out a.svg", r"error: --out a\.svg can hold only one schedule; use an \.html file"),
        ("schedule 1f1b --out nowhere/a.svg", r"error: cannot write --out nowhere/a\.svg: No such file"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(*arguments.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("schedule gpipe", "argument NAME: invalid choice: 'gpipe'"),
        ("schedule 1f1b --tokens 3", "unrecognized arguments: --tokens 3"),
        ("schedule 1f1b --memory 2", "unrecognized arguments: --memory 2"),
        ("all --activations 1 2", "unrecognized arguments: --activations 1 2"),
        ("csv x.csv --pp 8", "unrecognized arguments: --pp 8"),
        ("measured x --p2p 1", "unrecognized arguments: --p2p 1"),
        ("generation --deferred 0.5", "unrecognized arguments: --deferred 0.5"),
        ("schedule 1f1b --p2p 1e308", "argument --p2p: '1e308' should be a number from 0 to 1e+30"),
        ("search", "the following arguments are required: --memory"),
        ("search --memory 2 --step 2", "unrecognized arguments: --step 2"),
        (
            "search --memory 2 --chunks 1 --activations 1 2",
            "argument --activations: not allowed with argument --chunks",
        ),
        ("search_measured x --memory 2 --pp 2", "unrecognized arguments: --pp 2"),
    ],
)
def test_options_without_effect_are_rejected(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(*arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", drawing.COMMANDS)
def test_help_of_a_command_has_an_example_that_is_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    example = re.search(rf"python -m picotron\.drawing ({command} .*)", capsys.readouterr().out.partition("\n\n")[2])
    assert example
    drawing.make_parser().parse_args(example[1].split())
