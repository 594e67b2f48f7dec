"""The puzzles about schedules, whose checks need no torch: their statements, and the check of an answer."""

import inspect
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from puzzles import p12_1f1b, p13_bubble, p14_messages
from puzzles.answers import judge, load
from puzzles.catalogue import find
from puzzles.checks import p12_1f1b as check_12
from puzzles.checks import p13_bubble as check_13
from puzzles.checks import p14_messages as check_14
from puzzles.report import Report

PUZZLES = {"12": (p12_1f1b, check_12), "13": (p13_bubble, check_13), "14": (p14_messages, check_14)}


def puzzle(argument: str) -> dict[str, Any]:
    """Return the file of a puzzle and its hints, or check an answer.

    Args:
        argument: as JSON, the `number` of the puzzle and the `text` of the answer, "" for the file.
    """
    request = json.loads(argument)
    module, check = PUZZLES[request["number"]]
    known = find(request["number"])
    assert known
    if not request["text"]:
        return {"text": inspect.getsource(module), "hints": known.hints}
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / known.path.name  # a file, because messages quote its lines
        path.write_text(request["text"])
        judge(check.check, partial(load, path), None, report, path)
    lines = [
        f"{report.verdict}: {report.sentence}".removesuffix(": "),
        f"Score: {report.score}" if report.score else "",
    ]
    lines.append(f"In picotron: {known.place}" if report.verdict == "RIGHT" else "")
    return {
        "right": report.verdict == "RIGHT",
        "sentences": [line for line in lines if line],
        "picture": report.picture,
    }
