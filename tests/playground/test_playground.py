"""The playground's Python: what the page gets for its requests. (playground/tests has the tests in a browser.)"""

import json
import re
from typing import Any

import pytest

from picotron.drawing.draw_svg import boxes
from picotron.schedules.actions import Overlapped
from picotron.schedules.order import run_order
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, Span, memory_curves, simulate, simulate_events, summary
from picotron.schedules.trace import trace_line, waited_for
from playground.bridge import call


def ask(function: str, **request: Any) -> Any:
    return json.loads(call(function, json.dumps(request)))


# ----------------------------------------------------------------------------------------------------------- timelines


@pytest.mark.parametrize("name", SCHEDULES)
def test_timeline_is_that_of_the_simulator(name: str) -> None:
    drawn = ask("timeline", schedule=name, pp=4, microbatches=6, message=0.3, B=2.5, overlapped=0.8)
    schedule = build(name, 4, 6)
    weights = [1 / schedule.chunks] * schedule.num_stages
    step = simulate(schedule, Costs(B=2.5, overlapped=0.8, p2p=0.3, weights=weights))
    assert [[tuple(span) for span in rank] for rank in rows(drawn)] == [
        [(str(action), start, end) for action, start, end in rank] for rank in step.spans
    ]
    assert (drawn["step_time"], drawn["bubble"], drawn["idle"]) == (step.step_time, step.bubble, step.idle)
    shown = " ".join(f"{peak:.4g}" for peak in drawn["peaks"])
    assert shown == summary(step)["peak activations by pp rank"]


def rows(drawn: dict[str, Any]) -> list[list[tuple[str, float, float]]]:
    return [
        list(zip(*rank, strict=True)) for rank in zip(drawn["actions"], drawn["starts"], drawn["ends"], strict=True)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_are_those_of_the_memory_curve(name: str) -> None:
    drawn = ask("timeline", schedule=name, pp=3, microbatches=5)
    schedule = build(name, 3, 5)
    step = simulate(schedule, Costs(weights=[1 / schedule.chunks] * schedule.num_stages))
    for rank, curve in enumerate(memory_curves(step)):
        levels = [level for pair in zip(drawn["during"][rank], drawn["after"][rank], strict=True) for level in pair]
        assert levels == pytest.approx([live for _, live in curve[1:]], abs=1e-8)


def test_colours_are_those_of_the_pictures() -> None:
    drawn = ask("timeline", schedule="zbv", pp=2, microbatches=2)
    step = simulate(build("zbv", 2, 2), Costs(weights=[0.5] * 4))
    colours = {(box.label, box.start, box.rank): box.colour for box in boxes(step)}
    for rank, spans in enumerate(rows(drawn)):
        for action, start, _ in spans:
            stage, kind, microbatch = re.fullmatch(r"(\d+)(\w)(\d+)", action).groups()  # type: ignore[union-attr]
            assert drawn["colours"][kind][int(stage) // 2] == colours[microbatch, start, rank]


@pytest.mark.parametrize("message", [0.0, 0.4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_critical_path_is_as_long_as_the_step(name: str, message: float) -> None:
    """Its actions, and the messages between ranks, fill the step without a gap."""
    drawn = ask("timeline", schedule=name, pp=4, microbatches=6, message=message, factors="1 1.5 1 1", last=0.2)
    spans = [(rank, *span) for rank, spans in enumerate(rows(drawn)) for span in spans]
    at = max(range(len(spans)), key=lambda i: spans[i][3])
    length = 0.0
    while at >= 0:
        rank, _, start, end = spans[at]
        before = drawn["waits"][at]
        length += end - start + (message if before >= 0 and spans[before][0] != rank else 0)
        if before >= 0:
            arrival = spans[before][3] + (message if spans[before][0] != rank else 0)
            assert start == pytest.approx(arrival, rel=1e-9)
        at = before
    assert length == pytest.approx(drawn["step_time"], rel=1e-9)


def test_actions_wait_for_the_message_that_arrives_last() -> None:
    """Of a pair's two inputs, the later one; not the result of the pair's own rank, although it can be newer."""
    schedule = build("dualpipev", 4, 10)
    events = run_order(schedule)
    step = simulate_events(events, 4, Costs(p2p=0.5, weights=[0.5] * 8))
    ends = [next(s.end for s in step.spans[event.rank] if s.action == event.action) for event in events]
    starts = [next(s.start for s in step.spans[event.rank] if s.action == event.action) for event in events]
    waits = waited_for(events, step)
    crossing = [
        (event, before)
        for event, before in zip(events, waits, strict=True)
        if before is not None and events[before].rank != event.rank
    ]
    assert any(isinstance(event.action, Overlapped) for event, _ in crossing)
    for number, (event, before) in enumerate(zip(events, waits, strict=True)):
        if before is not None:
            latency = 0.5 if events[before].rank != event.rank else 0.0
            assert starts[number] == ends[before] + latency


def test_first_and_last_stages_and_factors_change_the_times() -> None:
    drawn = ask("timeline", schedule="zbv", pp=2, microbatches=2, first=1, last=0.25, factors="1 2 3 4")
    time = {action: end - start for rank in rows(drawn) for action, start, end in rank}
    assert [time[f"{stage}F0"] for stage in range(4)] == [1.5, 1, 1.5, 3]  # (0.5 + 1) x 1, 0.5 x 2, 0.5 x 3, 0.75 x 4
    drawn = ask("timeline", schedule="zbv", pp=2, microbatches=2, factors="1, 3")
    time = {action: end - start for rank in rows(drawn) for action, start, end in rank}
    assert [time[f"{stage}F0"] for stage in range(4)] == [0.5, 1.5, 1.5, 0.5]  # by rank


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ("1 x", "the factors '1 x' are not numbers above 0, separated by spaces"),
        ("1 0 1 1", "the factors '1 0 1 1' are not numbers above 0, separated by spaces"),
        ("1 nan 1 1", "the factors '1 nan 1 1' are not numbers above 0, separated by spaces"),
        ("1 2 3", "there are 3 factors; write 4, one for each pp rank, or 8, one for each stage"),
    ],
)
def test_wrong_factors_are_explained(factors: str, message: str) -> None:
    assert ask("timeline", schedule="zbv", factors=factors) == {"error": message, "field": "factors"}


def test_layout_gives_stages_their_times_and_activations() -> None:
    """Of 8 layers on 4 ranks, a stage with 3 takes 3 / 2 of the mean."""
    drawn = ask("timeline", schedule="afab", pp=4, microbatches=2, layout="Et|ttt|ttt|tL", last=0.25)
    time = {action: end - start for rank in rows(drawn) for action, start, end in rank}
    assert [time[f"{stage}F0"] for stage in range(4)] == [0.5, 1.5, 1.5, 0.75]
    assert drawn["peaks"] == [1, 3, 3, 1]
    drawn = ask("timeline", schedule="zbv", pp=2, microbatches=1, layout="Ettt|t|t|tttL")
    assert drawn["peaks"] == [1.5, 0.5]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|tt|tL", "pp_layout='Et|tt|tL' has 3 stages, but the schedule has 4 (pp ranks times chunks)"),
        ("Et|t|t|x", "cannot parse pp_layout='Et|t|t|x' at character 8, 'x'"),
        ("E|||L", "pp_layout='E|||L' has no layers (t)"),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_wrong_layouts_are_explained(schedule: str, layout: str, message: str) -> None:
    result = ask("timeline", schedule=schedule, pp=4, layout=layout)
    assert result["error"].startswith(message)
    assert result["field"] == "layout"


def test_search_uses_the_layout() -> None:
    request = {"pp": 2, "microbatches": 4, "layout": "Et|tt|tt|tL", "memory": 2.5}
    best = ask("best", **request)
    assert best["chunks"] == 2
    fitting = [row for row in ask("ranking", **request) if row.get("fits")]
    assert fitting
    assert best["step_time"] <= min(row["step_time"] for row in fitting)
    assert best["peak"] <= 2.5
    errors = {row["schedule"] for row in ask("ranking", **request) if "has 4 stages" in row.get("error", "")}
    assert errors == {name for name, recipe in SCHEDULES.items() if recipe.chunks == 1}
    assert "one micro-batch takes 1 on a pp rank" in ask("best", **{**request, "memory": 0.5})["error"]


def test_messages_queue_for_a_link() -> None:
    """The second message leaves when the first one has: forwards at 1 and 2 arrive at 4 and 7."""
    drawn = ask("timeline", schedule="afab", pp=2, microbatches=2, transfer=3)
    assert drawn["starts"][1][:2] == [4, 7]


def test_chunks_and_groups_are_for_the_schedules_that_have_them() -> None:
    request = {"pp": 4, "microbatches": 8, "chunks": 3, "group_size": 8}
    assert ask("timeline", schedule="interleaved_1f1b", **request)["actions"] == [
        [str(action) for action in program] for program in build("interleaved_1f1b", 4, 8, 3, 8).programs
    ]
    assert ask("timeline", schedule="1f1b", **request)["chunks"] == 1
    assert ask("timeline", schedule="zbv", **request)["chunks"] == 2


# ------------------------------------------------------------------------------------------------------- own schedules


def test_csv_and_python_of_a_schedule_give_its_timeline() -> None:
    for name in SCHEDULES:
        original = ask("timeline", schedule=name, pp=4, microbatches=6, chunks=2)
        texts = ask("edit", schedule=name, pp=4, microbatches=6, chunks=2)
        for language in ("csv", "python"):
            drawn = ask("timeline", schedule=language, text=texts[language], pp=4, microbatches=6, chunks=2)
            assert drawn["actions"] == original["actions"], (name, language)
            assert (drawn["starts"], drawn["placement"]) == (original["starts"], original["placement"])


def test_edit_returns_the_text_of_the_readers_own_schedule() -> None:
    assert ask("edit", schedule="csv", text="0F0, 0B0")["csv"] == "0F0,0B0\n"
    assert "python" not in ask("edit", schedule="auto")


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("csv", "", "the schedule in the editor is empty; expected a line of actions like 0F0,0B0 for each pp rank"),
        ("csv", "0F0,0Q0", "the schedule in the editor has '0Q0' in line 1, column 2; expected stage, kind"),
        ("csv", "0F0,0B0\n1F0", "pp rank 1 lacks 1B0"),
        ("csv", "0F0,0B0,0B0", "pp rank 0 has 0B0 twice"),
        ("python", "x = 1", "there is no function; write one like: def mine(rank, pp, microbatches): ..."),
        ("python", "def f(:", "line 1: "),
        ("python", "\n1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("python", "def f(rank, pp, microbatches):\n    return programme", "line 2: NameError: name 'programme'"),
        ("python", "def f(rank):\n    return []", "TypeError: f() takes 1 positional argument but 3 were given"),
        ("python", "def f(rank, pp, microbatches):\n    return [1]", "f returns [1] for pp rank 0; it must return a Program"),
        ("python", "def f(rank, pp, microbatches):\n    return [Action('F', rank)]", "pp rank 0 lacks 0B0"),
        ("python", "def f(rank, pp, m):\n    return [Action('F', rank, i) for i in range(9999)]", "the schedule has 39,996"),
    ],
)  # fmt: skip
def test_mistakes_in_the_editor_are_explained(language: str, text: str, message: str) -> None:
    assert ask("timeline", schedule=language, text=text)["error"].startswith(message)


def test_a_deadlock_shows_its_cycle_and_what_runs_before() -> None:
    result = ask("timeline", schedule="csv", text="0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert result["error"].startswith(
        "deadlock: pp rank 0 waits at 0B0 for 1B0 of pp rank 1, which waits at 1F1 for 0F1"
    )
    assert result["deadlock"]["cycle"] == [
        {"rank": 0, "action": "0B0", "awaited": "1B0", "other": 1},
        {"rank": 1, "action": "1F1", "awaited": "0F1", "other": 0},
    ]
    drawing = result["deadlock"]["drawing"]
    assert (drawing["starts"], drawing["ends"]) == ([[0], [1]], [[1], [2]])  # 0F0 and 1F0


# -------------------------------------------------------------------------------------------------- ranking, and trace


def test_ranking_has_every_schedule_and_what_fits() -> None:
    rows = ask("ranking", pp=4, microbatches=8, memory=4)
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    for row in rows:
        drawn = ask("timeline", schedule=row["schedule"], pp=4, microbatches=8)
        assert (row["step_time"], row["bubble"]) == (drawn["step_time"], drawn["bubble"])
        assert row["peak"] == max(drawn["peaks"])
        assert row["fits"] == (row["peak"] <= 4)
    best = ask("best", pp=4, microbatches=8, memory=4)
    assert best["fits"]
    assert best["step_time"] <= min(row["step_time"] for row in rows if row["fits"])
    assert best["step_time"] == ask("timeline", schedule="auto", pp=4, microbatches=8, memory=4)["step_time"]


def test_ranking_says_what_cannot_be_built() -> None:
    rows = ask("ranking", pp=4, microbatches=8, group_size=3)
    assert [row["schedule"] for row in rows if "error" in row] == ["interleaved_1f1b", "zb_h1"]
    assert "too low" in ask("best", pp=4, microbatches=8, memory=0.5)["error"]


def test_trace_is_drawn_with_its_simulation() -> None:
    schedule = build("1f1b", 2, 3)
    step = simulate(schedule, Costs(F=0.01, B=0.02, p2p=0.001))
    lines = [trace_line(rank, span) for rank, spans in enumerate(step.spans) for span in spans]
    lines.append(json.dumps({"rank": 0, "action": "0SEND_F0", "start": 0.009, "end": 0.011}))
    result = json.loads(call("trace", "\n".join(lines)))
    assert result["simulated"]["actions"] == [[str(action) for action in program] for program in schedule.programs]
    assert result["simulated"]["step_time"] == pytest.approx(step.step_time, rel=1e-9)
    assert result["measured"]["step_time"] == step.step_time
    assert result["measured"]["actions"][0][1] == "0SEND_F0"
    assert result["measured"]["during"][0][:3] == [1, None, 2]
    assert result["measured"]["bubble"] == step.bubble
    names = {kind: [name for rank in result[kind]["actions"] for name in rank] for kind in result}
    waits = {kind: result[kind]["waits"] for kind in result}
    waited = {
        kind: {name: names[kind][at] for name, at in zip(names[kind], waits[kind], strict=True) if at >= 0}
        for kind in result
    }
    assert waited["measured"] == waited["simulated"]
    assert waited["measured"]["1F0"] == "0F0"
    assert waited["measured"]["1F1"] == "1B0"
    assert "0SEND_F0" not in waited["measured"]


@pytest.mark.parametrize(("end", "expected"), [(2.7, "1B0"), (2.9, "0F1")])
def test_measured_action_waited_for_what_arrived_last(end: float, expected: str) -> None:
    """1F1 starts long after both of its inputs. Messages take 0.2, and 1B0 ends at 3."""
    forwards = [(0, "0F0", 0.0, 1.0), (0, "0F1", 1.0, end), (1, "1F0", 1.2, 2.0), (1, "1F1", 5.0, 6.0)]
    backwards = [(1, "1B0", 2.0, 3.0), (0, "0B0", 3.2, 4.0), (1, "1B1", 6.0, 7.0), (0, "0B1", 7.2, 8.0)]
    events = (dict(zip(("rank", "action", "start", "end"), span, strict=True)) for span in forwards + backwards)
    measured = json.loads(call("trace", "\n".join(map(json.dumps, events))))["measured"]
    names = [name for rank in measured["actions"] for name in rank]
    assert names[measured["waits"][names.index("1F1")]] == expected


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("no trace", "the file is not a valid trace: line 1 is 'no trace'"),
        ("", "the file is incomplete"),
        (trace_line(0, Span(build("1f1b", 1, 1).programs[0][0], 0, 1)), "the schedule in the file cannot run: pp rank 0 lacks"),
    ],
)  # fmt: skip
def test_wrong_traces_are_explained(contents: str, message: str) -> None:
    assert json.loads(call("trace", contents))["error"].startswith(message)
