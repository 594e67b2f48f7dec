"""Comparisons of results with expected values, and random tensors."""

from typing import Any

import torch
from torch import Tensor

from puzzles.report import kind


def number(value: Any) -> str:
    """Format a number of a tensor with enough digits to see a difference."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def difference(result: Any, expected: Any, name: str | tuple[str, ...] = "result", tolerance: float = 1e-9) -> str:
    """Return the first difference in a sentence, or nothing if there is none.

    Args:
        expected: a tensor, a tuple of expected values, or a value to be equal to.
        name: what the value is; for a tuple, a name of each of its values.
        tolerance: for tensors, relative to the largest expected number, or to 1e-3 if that is less.
    """
    if isinstance(name, tuple):
        if not isinstance(result, tuple | list) or len(result) != len(expected):
            return f"expected a tuple of {len(expected)} values ({', '.join(name)}), but got {kind(result)}"
        values = zip(result, expected, name, strict=True)
        return next(filter(None, (difference(*each, tolerance) for each in values)), "")
    if not isinstance(expected, Tensor):
        shown = repr(result) if type(result) is type(expected) else kind(result)
        return "" if same(result, expected) else f"{name} is {shown}, expected {expected!r}"
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return f"{name} should be {kind(expected)}, but is {kind(result)}"
    if result.dtype != expected.dtype:
        return f"{name} should be {kind(expected)}, but is {kind(result)}"
    result, expected = result.detach(), expected.detach()
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    wrong = ~((result - expected).abs() <= tolerance * max(scale, 1e-3)) & ~(result == expected)
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    at = f"[{', '.join(map(str, place))}]" if place else ""
    others = f" ({wrong.sum()} of {wrong.numel()} numbers differ)" if wrong.numel() > 1 else ""
    if factor := common_factor(result, expected, tolerance):
        others = f"; {factor}"
    return f"{name}{at} is {number(result[place].item())}, expected {number(expected[place].item())}{others}"


def same(result: Any, expected: Any) -> bool:
    """Return whether a value equals an expected one; a tensor can be a number."""
    if isinstance(result, Tensor):
        return result.numel() == 1 and result.item() == expected
    return bool(result == expected)


def common_factor(result: Tensor, expected: Tensor, tolerance: float) -> str:
    """Return by which factor all of several numbers are wrong, or nothing."""
    if expected.numel() < 2 or not bool((expected.isfinite() & result.isfinite()).all()) or not expected.any():
        return ""
    factor = ((result * expected).sum() / expected.square().sum()).item()  # of least squares
    if factor == 0 or not torch.allclose(result, factor * expected, rtol=0, atol=tolerance * result.abs().max().item()):
        return ""
    if abs(factor + 1) < tolerance:
        return "every number has the wrong sign"
    if factor < 0:
        return f"every number is multiplied by {factor:.6g}"
    return f"every number is {max(factor, 1 / factor):.6g} times too {'large' if factor > 1 else 'small'}"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    """Return random numbers in float64, the same on every rank."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)
