"""The report of a check. No torch here, because some checks also run in a browser, see playground/puzzles.py."""

import dataclasses
from typing import Any

RED = "#d55e00"  # wrong parts of a picture; of Okabe and Ito's colours, which colour-blind people can distinguish


class Wrong(Exception):
    """The difference between the learner's result and the expected one, in a sentence."""


class Misuse(Exception):
    """A call of a function of `Group` that cannot work; an error of the learner's code."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A quantity to make as small as possible.

    Args:
        par: the largest value that solves the puzzle.
        best: the smallest value known.
        pattern: format of a value, with its unit.
    """

    name: str
    value: float
    par: float
    best: float
    pattern: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.pattern.format(self.value)}"

    @property
    def reached(self) -> bool:
        return self.value <= self.par * (1 + 1e-9)

    def __str__(self) -> str:
        return f"{self.text} (par {self.pattern.format(self.par)}, best known {self.pattern.format(self.best)})"


@dataclasses.dataclass
class Report:
    """The result of a check, which fills it in as it goes.

    Args:
        verdict: RIGHT, WRONG, OVER PAR, NOT DONE YET, NOT OFFERED (by an adapter), ERROR or HANGS.
        sentence: the first difference or the error; empty if the answer is right.
        picture: an SVG drawing of the learner's answer, or nothing.
        files: other files for the learner, by name.
        case: the input with which the learner's code was called last.
    """

    verdict: str = "RIGHT"
    sentence: str = ""
    picture: str = ""
    score: Score | None = None
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    case: str = ""

    def begin(self, case: str) -> None:
        """Name the input of the next call of the learner's code, and drop what belongs to an earlier one."""
        self.case, self.picture, self.score = case, "", None

    def ask(self, learner: Any, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a function of the learner's code. The case is this call, in which the last arguments have names."""
        words = [*map(repr, arguments), *(f"{key}={value}" for key, value in named.items())]
        self.begin(f"{name}({', '.join(words)})")
        return getattr(learner, name)(*arguments, *named.values())


def kind(value: Any) -> str:
    """Describe a value: a tensor by its shape and dtype, anything else by its type and text."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = f"{type(value).__name__.lower()} of shape {tuple(value.shape)}"
        return f"a {shape}, {str(value.dtype).removeprefix('torch.')}"
    if value is None:
        return "None; is a return missing?"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def require(condition: bool, sentence: str) -> None:
    """Raise Wrong with a sentence if a condition does not hold. (With several ranks, see `Group.require`.)"""
    if not condition:
        raise Wrong(sentence)
