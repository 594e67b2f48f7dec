"""The puzzles in order, with hints. No torch here, so that listing them takes no time."""

import dataclasses
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A puzzle.

    Args:
        name: name of its three files, which begins with its number.
        topic: one of the parts of the learning path.
        title: the title, as at the top of the file.
        page: page and section of the docs from which one can solve it.
        hints: three hints, each of which says more than the one before.
    """

    name: str
    topic: str
    title: str
    page: str
    hints: tuple[str, str, str]

    @property
    def number(self) -> int:
        return int(self.name[1:3])

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def solution(self) -> Path:
        return FOLDER / "solutions" / f"{self.name}.py"


PUZZLES = [
    Puzzle(
        "p01_all_reduce",
        "collectives",
        "an all-reduce in two halves",
        "docs/data_parallel.md#bytes-sent-and-kept-per-step",
        (
            "If P is divisible by the number of ranks, one line is enough: first one of the two functions, then the other.",
            "After reduce_scatter, each rank has a different part of the sum; all_gather joins the parts in the right order.",
            "For other P, append zeros until the length is divisible, for example with torch.nn.functional.pad, and cut "
            "the result back to P numbers.",
        ),
    ),
    Puzzle(
        "p02_ring",
        "collectives",
        "an all-reduce on a ring",
        "docs/data_parallel.md#bytes-sent-and-kept-per-step",
        (
            "Cut x into n chunks with x.tensor_split(n), and let every chunk travel around the ring. Which chunk does each "
            "rank send first, so that all ranks send different ones?",
            "First round, n - 1 steps: in step s, rank r sends chunk r - s (modulo n), receives chunk r - s - 1 from the "
            "previous rank, and adds its own. Then one chunk on each rank is a complete sum. Which one?",
            "Rank r has the sum of chunk r + 1. Second round, n - 1 steps: in step s, rank r sends chunk r + 1 - s, and "
            "replaces chunk r - s by the one that it receives.",
        ),
    ),
    Puzzle(
        "p03_place",
        "data",
        "which rank trains on a sample, and when",
        "docs/training_step.md#how-a-global-batch-is-divided",
        (
            "The page has the formula for the number of a sample. Its four terms are digits of that number, in a mixed base.",
            "divmod(sample, samples per step) is the step, and what remains within it.",
            "What remains: divide by the samples of a micro-batch on all ranks, B dp, then by B.",
        ),
    ),
]


def find(text: str) -> Puzzle | None:
    """Return the puzzle with a number like 7, 07, p07 or p07_mlp."""
    return next(
        (each for each in PUZZLES if text in (str(each.number), each.name[1:3], each.name[:3], each.name)), None
    )
