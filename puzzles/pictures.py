"""Pictures of the learner's answers."""

from collections.abc import Sequence
from typing import NamedTuple

from docs.programs.svg import CHARACTER, LINE, RANKS, WIDTH, Svg
from puzzles.report import RED

PALE = "#cfe3f5"


class Cell(NamedTuple):
    """A box in a row: its text, its colour, and its width in units of the other boxes' widths."""

    text: str
    colour: str = PALE
    width: float = 1.0
    title: str = ""


def colour_of(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


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


def compared(title: str, results: Sequence[Sequence[float]], expected: Sequence[float]) -> str:
    """Draw each rank's numbers, wrong ones in red."""
    lines = []
    for rank, numbers in enumerate(results):
        wrong = [
            i >= len(expected) or not abs(x - expected[i]) <= 1e-9 * abs(expected[i]) for i, x in enumerate(numbers)
        ]
        cells = [Cell(f"{x:g}", RED if bad else PALE) for x, bad in zip(numbers, wrong, strict=True)]
        lines.append((f"rank {rank}", cells))
    lines.append(("expected", [Cell(f"{x:g}", "#ffffff") for x in expected]))
    return rows(
        title,
        lines,
        "Red: wrong. Rank r adds (i + 1) 100^r to number i, so the digits show whose numbers are in a sum.",
    )
