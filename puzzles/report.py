"""What the check of a puzzle finds out."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

RED = "#d55e00"  # wrong parts of a picture; of Okabe and Ito's colours, which colour-blind people can distinguish


class Wrong(Exception):
    """The difference between the learner's result and the expected one, in a sentence."""


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
        verdict: RIGHT, WRONG, OVER PAR, NOT DONE YET, ERROR or HANGS.
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


def number(value: Any) -> str:
    """Format a number of a tensor with enough digits to see a difference."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def kind(value: Any) -> str:
    """Describe a value: a tensor by its shape and dtype, anything else by its type and text."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if value is None:
        return "None; is a return missing?"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def difference(result: Any, expected: Any, name: str = "result", tolerance: float = 1e-9) -> str:
    """Return the first difference in a sentence, or nothing if there is none.

    Args:
        expected: a tensor, a tuple of expected values, or a value to be equal to.
        tolerance: for tensors, relative to the largest expected number.
    """
    if isinstance(expected, tuple):
        if not isinstance(result, tuple | list) or len(result) != len(expected):
            return f"{name} should be a tuple of {len(expected)} values, but is {kind(result)}"
        pairs = zip(result, expected, strict=True)
        return next(filter(None, (difference(a, b, f"{name}[{i}]", tolerance) for i, (a, b) in enumerate(pairs))), "")
    if not isinstance(expected, Tensor):
        return "" if result == expected else f"{name} is {kind(result)}, expected {expected!r}"
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return f"{name} should be {kind(expected)}, but is {kind(result)}"
    if result.dtype != expected.dtype:
        return f"{name} should be {kind(expected)}, but is {kind(result)}"
    result, expected = result.detach(), expected.detach()
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    wrong = ~((result - expected).abs() <= tolerance * max(scale, 1e-30)) & ~(result == expected)
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    at = f"[{', '.join(map(str, place))}]" if place else ""
    others = f" ({wrong.sum()} of {wrong.numel()} numbers differ)" if wrong.numel() > 1 else ""
    return f"{name}{at} is {number(result[place].item())}, expected {number(expected[place].item())}{others}"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    """Return random numbers in float64, the same on every rank."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)
