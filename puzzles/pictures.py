"""Pictures of the learner's answers."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from docs.programs.svg import colour_of
from puzzles.report import RED
from workbench.drawing.draw_svg import CHARACTER, LINE, WIDTH, Svg

PALE = "#cfe3f5"


class Cell(NamedTuple):
    """A box in a row: its text, its colour, and its width in units of the other boxes' widths."""

    text: str
    colour: str = PALE
    width: float = 1.0
    title: str = ""


def rows(title: str, lines: Sequence[tuple[str, Sequence[Cell]]], note: str = "", height: int = 34) -> str:
    """Draw a labelled row of boxes for each line, and a note below."""
    left = 16 + CHARACTER * max(len(label) for label, _ in lines)
    unit = min((WIDTH - left) / max(1.0, *(sum(cell.width for cell in cells) for _, cells in lines)), 120)
    picture = Svg(WIDTH, LINE + 8 + len(lines) * (height + 8) + (LINE if note else 0))
    picture.text(0, 16, title, "title")
    for i, (label, cells) in enumerate(lines):
        x, y = left, LINE + 8 + i * (height + 8)
        picture.text(0, y + height / 2 + 6, label)
        for cell in cells:
            picture.box(x, y, cell.width * unit, height, cell.colour, cell.text, cell.title)
            x += cell.width * unit
    if note:
        picture.text(0, LINE + 8 + len(lines) * (height + 8) + 14, note)
    return str(picture)


def numbers(result: Any) -> list[float]:
    """Return the numbers of a vector; none of any other result."""
    return result.tolist() if getattr(result, "ndim", 0) == 1 else []


def compared(
    title: str, results: Mapping[str, Sequence[float]], expected: Sequence[float], note: str = "Red: wrong."
) -> str:
    """Draw numbers by whose they are, wrong ones in red, above those that are expected."""
    lines = []
    for label, found in results.items():
        pairs = itertools.zip_longest(found, expected[: len(found)], fillvalue=math.nan)
        wrong = [not abs(x - right) <= 1e-9 * max(1.0, abs(right)) for x, right in pairs]
        lines.append((label, [Cell(f"{x:.6g}", RED if bad else PALE) for x, bad in zip(found, wrong, strict=True)]))
    lines.append(("expected", [Cell(f"{x:.6g}", "#ffffff") for x in expected]))
    return rows(title, lines, note)


def verdicts(title: str, right: Mapping[str, bool], lines: Sequence[tuple[str, Sequence[Cell]]] = ()) -> str:
    """Draw which parts of a result are right, below other lines."""
    boxes = [(name, [Cell("right" if ok else "wrong", PALE if ok else RED, 3)]) for name, ok in right.items()]
    return rows(title, [*lines, *boxes])


def messages(logs: Sequence[Sequence[tuple[int, int]]], unit: float, size: str) -> str:
    """Draw the messages of all ranks.

    Args:
        logs: receiver and numbers of each message that a rank sends.
        unit: numbers for which a box says 1.
        size: what it says.
    """
    lines = [
        (f"rank {rank} sends", [Cell(f"{count / unit:g} to {to}", colour_of(to)) for to, count in log if count])
        for rank, log in enumerate(logs)
    ]
    note = f"Each box is a message: its {size}, and its receiver (also its colour)."
    return rows(f"Messages of {len(logs)} ranks", lines, note)
