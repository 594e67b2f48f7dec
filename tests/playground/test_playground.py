"""The playground's Python: what the page gets for its requests. (playground/tests has the tests in a browser.)"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from playground.bridge import call
from playground.build import results
from playground.puzzles import PUZZLES
from puzzles.catalogue import find
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.simulate import Costs, memory_curves, simulate
from workbench.schedules.trace import trace_line


def ask(function: str, **request: Any) -> Any:
    return json.loads(call(function, json.dumps(request)))


def rows(drawn: dict[str, Any]) -> list[list[tuple[str, float, float]]]:
    return [
        list(zip(*rank, strict=True)) for rank in zip(drawn["actions"], drawn["starts"], drawn["ends"], strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------- timelines


@pytest.mark.parametrize("name", ["interleaved_1f1b", "dualpipev"])
def test_timeline_is_that_of_the_simulator(name: str) -> None:
    drawn = ask("timeline", schedule=name, pp=4, micro_batches=6, message=0.3, transfer=0.2, B=2.5, overlapped=0.8)
    schedule = build(name, 4, 6)
    weights = [1 / schedule.chunks] * schedule.num_stages
    step = simulate(schedule, Costs(B=2.5, overlapped=0.8, p2p=0.3, transfer=0.2, weights=weights))
    assert rows(drawn) == [[(str(action), start, end) for action, start, end in rank] for rank in step.spans]
    assert (drawn["step_time"], drawn["bubble"], drawn["idle"]) == (step.step_time, step.bubble, step.idle)
    for rank, curve in enumerate(memory_curves(step)):
        levels = [level for pair in zip(drawn["during"][rank], drawn["after"][rank], strict=True) for level in pair]
        assert levels == pytest.approx([live for _, live in curve[1:]], abs=1e-8)
        assert drawn["peaks"][rank] == pytest.approx(max(levels))


def test_best_schedule_fits_and_is_at_least_as_fast_as_those_that_fit() -> None:
    request = {"pp": 2, "micro_batches": 4, "layout": "Et|tt|tt|tL", "memory": 2.5}
    ranking, best = ask("ranking", **request), ask("best", **request)
    assert [row["schedule"] for row in ranking] == list(SCHEDULES)
    assert {SCHEDULES[row["schedule"]].chunks for row in ranking if "error" in row} == {1}  # the layout has two
    assert best["peak"] <= 2.5
    assert best["step_time"] <= min(row["step_time"] for row in ranking if row.get("fits"))
    assert best["step_time"] == ask("timeline", schedule="auto", **request)["step_time"]


# ------------------------------------------------------------------------------------------------------- own schedules


def test_csv_and_python_of_a_schedule_give_its_timeline() -> None:
    request = {"pp": 4, "micro_batches": 6, "chunks": 2}
    original, texts = ask("timeline", schedule="zb_h1", **request), ask("edit", schedule="zb_h1", **request)
    for language in ("csv", "python"):
        drawn = ask("timeline", schedule=language, text=texts[language], **request)
        assert drawn["starts"] == original["starts"], language


def test_links_of_the_page_open_the_solution_of_a_puzzle() -> None:
    page = Path("docs/reference/schedules_in_depth.md").read_text()
    (state,) = re.findall(r"playground\.md#(a=csv[^)]*)", page)
    drawn, _ = (each["result"] for each in results(state))
    assert (drawn["step_time"], drawn["placement"], max(drawn["peaks"])) == (20, "loop", 3)


F = "def f(rank, pp, m):\n    return "


@pytest.mark.parametrize(
    ("function", "asked", "field", "part"),
    [
        ("timeline", {"schedule": "zbv", "factors": "1 0 1 1"}, "factors", "'1 0 1 1'"),
        ("best", {"memory": 0.5}, None, "0.5"),
        ("train", {"pp": 1}, None, "Ranks"),
        ("timeline", {"schedule": "python", "text": f"{F}programme"}, None, "line 2: NameError"),
        ("timeline", {"schedule": "python", "text": f"{F}[Action('F', rank)] * 9999"}, None, "39,996 actions"),
    ],
)
def test_mistakes_are_explained(function: str, asked: dict[str, Any], field: str | None, part: str) -> None:
    result = ask(function, **asked)
    assert result.get("field") == field
    assert part in result["error"]


def test_a_deadlock_shows_its_cycle_and_what_runs_before() -> None:
    result = ask("timeline", schedule="csv", text="0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert result["error"].startswith("deadlock: ")
    assert result["deadlock"]["cycle"] == [
        {"rank": 0, "action": "0B0", "awaited": "1B0", "other": 1},
        {"rank": 1, "action": "1F1", "awaited": "0F1", "other": 0},
    ]


# --------------------------------------------------------------------------------------------------------------- trace


def test_trace_is_drawn_with_its_simulation() -> None:
    step = simulate(build("1f1b", 2, 3), Costs(F=0.01, B=0.02, p2p=0.001))
    lines = [trace_line(rank, span) for rank, spans in enumerate(step.spans) for span in spans]
    lines.append(json.dumps({"rank": 0, "action": "0SEND_F0", "start": 0.009, "end": 0.011}))
    result = json.loads(call("trace", "\n".join(lines)))
    assert result["simulated"]["step_time"] == pytest.approx(step.step_time, rel=1e-9)
    assert result["measured"]["step_time"] == step.step_time
    assert result["measured"]["actions"][0][1] == "0SEND_F0"
    assert result["measured"]["during"][0][:3] == [1, None, 2]
    assert json.loads(call("trace", "no trace"))["error"].startswith("the file is not a valid trace: line 1")


# ------------------------------------------------------------------------------------------------------------- puzzles


@pytest.mark.parametrize("number", PUZZLES)
def test_puzzle_takes_the_solution_and_explains_other_answers(number: str) -> None:
    """As `python -m puzzles` does, with the same code; tests/docs/test_puzzles.py has all kinds of wrong answers."""
    puzzle = find(number)
    assert puzzle
    solved = ask("puzzle", number=number, text=puzzle.solution.read_text())
    assert solved["right"]
    assert solved["sentences"][-1] == f"In picotron: {puzzle.place}"
    assert solved["picture"].startswith("<svg")
    statement = ask("puzzle", number=number, text="")
    assert statement["text"].startswith(f'"""Puzzle {number}')
    assert len(statement["hints"]) == 3
    (line,) = ask("puzzle", number=number, text="def program(*_):\n    return [7]\n")["sentences"]
    assert line.startswith("WRONG: ")
    assert line.endswith('7 is not an action such as "2F0"')
    (line,) = ask("puzzle", number=number, text="def program(*_):\n    return x\n")["sentences"]
    assert line.startswith(f"ERROR: {puzzle.path.name}, line 2, `return x`: NameError")
