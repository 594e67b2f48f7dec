"""Tables of the fastest schedules under the settings of `workbench.drawing.score`.

    python -m docs.programs.scoreboard

Entries are files in docs/schedules: NAME_PP_M.csv is a schedule, and NAME.json says whose it is.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from picotron.console import UserError
from workbench.console import first_line, text_table
from workbench.drawing.score import SIZES, Setting, bound, published, ranking, settings
from workbench.schedules.actions import Schedule
from workbench.schedules.schedule_csv import read_csv

FOLDER = Path("docs/schedules")
HEADER = ["memory", "message", "times", "at least", "fastest", "step time", "idle", "activations", "next"]


class Entry(NamedTuple):
    """A schedule in docs/schedules. `memory` is the smallest limit (a key of MEMORY) into which it fits."""

    schedule: Schedule
    name: str
    author: str
    link: str
    memory: str


def read_entry(path: Path) -> Entry:
    """Read NAME_PP_M.csv, and NAME.json beside it.

    Raises:
        UserError: the schedule has a fault, see `read_csv`, or NAME.json is missing or has other keys.
    """
    described = path.with_name(path.stem.rsplit("_", 2)[0] + ".json")
    try:
        return Entry(read_csv(path), **json.loads(described.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} needs {described} with name, author, link and memory: {first_line(error)}") from None


def entries() -> list[Entry]:
    return [read_entry(path) for path in sorted(FOLDER.glob("*.csv"))]


def row(setting: Setting, entered: list[Entry]) -> list[str]:
    """Return the fastest schedules (all that are equally fast), and the next one."""
    scores = ranking(setting, chain(published(setting), ((entry.name, entry.schedule) for entry in entered)))
    first = [score for score in scores if score.place == 1]
    after = [f"{score.name}: {score.step_time:.5g}" for score in scores[len(first) :]]
    return [
        *(setting.memory, f"{setting.message:g}", setting.times, f"{bound(setting):.5g}"),
        " and ".join(score.name for score in first),
        *(f"{first[0].step_time:.5g}", f"{first[0].bubble:.1%}", f"{first[0].peak:g}"),
        *(after[:1] or ["-"]),
    ]


def board() -> Iterator[str]:
    """Yield a table for each number of ranks and micro-batches."""
    entered = entries()
    for pp, micro_batches in ((pp, m) for pp, sizes in SIZES.items() for m in sizes):
        rows = [row(setting, entered) for setting in settings(pp, micro_batches)]
        yield f"p = {pp}, m = {micro_batches}\n{text_table([HEADER, *rows])}"


if __name__ == "__main__":
    print("\n\n".join(board()))
