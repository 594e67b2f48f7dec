"""Comparison of the ranks' results with the reference: the first difference by step, parameter, index and rank."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.reference import Reference
from conformance.result import Part, Result

LIMIT = 1e-9  # largest relative error in float64
Key = tuple[str, str, int]  # `Difference.what`, name of the parameter or "", step
Limits = Mapping[Key, float]  # what rounding to a narrow dtype explains
Error = Callable[[Tensor, Tensor, Tensor], float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference that a comparison finds.

    Args:
        what: `loss`, `gradient`, `gradient norm`, `evaluation`, `weight` or `token`.
        step: number of the step, from 1.
        ranks: ranks whose value differs.
        name: name of the parameter.
        index: index of the element in the whole tensor.
        found, right: its values.
        error: relative error, see `largest_error` and `mean_error`.
        bound: largest error that is allowed.
        hint: sentence about all elements.
    """

    what: str
    step: int
    ranks: tuple[int, ...] = ()
    name: str = ""
    index: tuple[int, ...] = ()
    found: float = math.nan
    right: float = math.nan
    error: float = math.inf
    bound: float = LIMIT
    hint: str = ""

    @property
    def key(self) -> Key:
        return self.what, self.name, self.step

    def __str__(self) -> str:
        place = f" of {self.name}{list(self.index) if self.index else ''}" if self.name else ""
        ranks = f" on rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        values = "" if math.isnan(self.right) else f" is {unequal(self.found, self.right)}"
        error = f" (error {self.error:.1e}, bound {self.bound:.1e})" if math.isfinite(self.error) else ""
        return f"step {self.step}: {self.what}{place}{ranks}{values}{error}" + (f"; {self.hint}" if self.hint else "")


def unequal(found: float, right: float) -> str:
    """Write two numbers, or how far the first is from the second if six digits do not tell."""
    if f"{found:.6g}" != f"{right:.6g}":
        return f"{found:.6g}, not {right:.6g}"
    return f"{right:.6g} {found - right:+.1e}, off by {abs(found / right - 1) if right else math.inf:.1e}"


def largest_error(found: Tensor, right: Tensor, whole: Tensor) -> float:
    """Return the largest |found - right| divided by the largest |right| of the whole tensor; infinity if not finite."""
    return quotient((found - right).abs().max().item(), whole.abs().max().item())


def mean_error(found: Tensor, right: Tensor, whole: Tensor) -> float:
    """Return the root mean square of found - right, divided by that of the whole tensor; infinity if not finite."""
    return quotient((found - right).square().mean().sqrt().item(), whole.square().mean().sqrt().item())


def quotient(error: float, scale: float) -> float:
    return 0.0 if error == 0.0 else error / scale if math.isfinite(error) and scale else math.inf


def relative_error(actual: Any, expected: Any) -> float:
    """Return `largest_error` of two tensors or lists of numbers.

    Raises:
        AssertionError: their shapes differ.
    """
    actual, expected = (torch.as_tensor(each, dtype=torch.complex128) for each in (actual, expected))
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    return largest_error(actual, expected, expected)


def errors_of_reference(found: Reference, right: Reference, first_step: int) -> dict[Key, float]:
    """Return the errors of all results of a second reference, as `compare` measures them for narrow dtypes."""
    return {each.key: each.error for each in measure([found.local()], right, first_step + 1, mean_error)}


def compare(
    results: Sequence[Result],
    right: Reference,
    first_step: int = 0,
    limits: Limits | None = None,
    known: Mapping[str, float] | None = None,
) -> tuple[dict[str, float], Difference | None]:
    """Compare the ranks' results with the reference, in the order in which a training step computes it.

    Args:
        results: results of the ranks, see `Result.local`.
        first_step: number of steps before the first one that was compared.
        limits: those of a narrow dtype; None: LIMIT in float64.
        known: the largest errors that are known, by `Difference.what`.

    Returns:
        The largest error of each kind of result, and the first difference, or None if all are equal.
    """
    errors: dict[str, float] = {}
    error_of = largest_error if limits is None else mean_error
    for each in measure(results, right, first_step + 1, error_of):
        bound = max(LIMIT if limits is None else limits.get(each.key, 0.0), (known or {}).get(each.what, 0.0))
        errors[each.what] = max(errors.get(each.what, 0.0), each.error)
        if not each.error <= bound:
            return errors, dataclasses.replace(each, bound=bound)
    return errors, None


def measure(results: Sequence[Result], right: Reference, step: int, error_of: Error) -> Iterator[Difference]:
    """Yield every result with its error, those of the first step first. Names come before numbers: with other
    parameters, it is another model.
    """
    kinds = {"loss": "losses", "gradient norm": "grad_norms", "evaluation": "evaluations"}
    last = step + len(right.losses) - 1
    for rank, result in enumerate(results):
        known = {*right.weights, "lm_head.weight"} if "model.embed_tokens.weight" in right.weights else right.weights
        for what, tensors in (*(("gradient", each) for each in result.gradients[:1]), ("weight", result.weights)):
            for unknown in sorted(tensors.keys() - known):
                yield Difference(what, step, (rank,), hint=f"the model has no parameter {unknown}")
    for i in range(len(right.losses)):
        for what, field in kinds.items():
            if what == "gradient norm" and any(each.gradients[i:] for each in results):
                found = [each.gradients[i] if i < len(each.gradients) else {} for each in results]
                yield from of_tensors("gradient", found, right.gradients[i], {}, step + i, error_of)
            yield from of_numbers(what, [getattr(each, field) for each in results], getattr(right, field), i, step + i)
    yield from of_tensors("weight", [each.weights for each in results], right.weights, right.initial, last, error_of)
    for rank, result in enumerate(results):
        for i, both in enumerate(zip(result.tokens, right.tokens, strict=False)):
            for place, (a, b) in enumerate(zip(*both, strict=False)):
                error = 0.0 if a == b else math.inf
                yield Difference("token", max(last, 1), (rank,), f"prompt {i}", (place,), a, b, error)
    lengths, wanted = {tuple(map(len, each.tokens)) for each in results if each.tokens}, tuple(map(len, right.tokens))
    if wanted and lengths != {wanted}:
        yield Difference("token", last, hint=f"the numbers of tokens of each prompt are {lengths or 0}, not {wanted}")


def of_numbers(
    what: str, lists: list[Sequence[float]], right: Sequence[float], i: int, step: int
) -> Iterator[Difference]:
    if right and not any(map(len, lists)):
        yield Difference(what, step, hint="no rank returned it")
    for rank, values in enumerate(lists if right else ()):
        if len(values) not in (0, len(right)):
            yield Difference(what, step, (rank,), hint=f"{len(values)} values for {len(right)} steps")
            return
        if len(values):
            a, b = float(values[i]), right[i]
            same = tuple(r for r, each in enumerate(lists) if len(each) > i and float(each[i]) == a)
            yield Difference(what, step, same, found=a, right=b, error=quotient(abs(a - b), abs(b)))


def of_tensors(
    what: str,
    of_ranks: Sequence[Mapping[str, Any]],
    right: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    step: int,
    error_of: Error,
) -> Iterator[Difference]:
    """Measure tensors. With `mean_error`, the error of a weight is relative to its update."""
    if not any(of_ranks):
        if what == "weight" and right:
            yield Difference(what, step, hint="no rank returned it")
        return
    for name, whole in right.items():
        is_tied = name == "model.embed_tokens.weight" and "lm_head.weight" not in right
        missing, scale = torch.ones(whole.shape, dtype=torch.bool), whole
        parts = dict[Any, tuple[int, Difference]]()  # the worst replica of each part, with its number of elements
        if error_of is mean_error and name in initial:
            scale = whole - initial[name]
        for rank, found in enumerate(of_ranks):
            for other in filter(found.__contains__, [name, "lm_head.weight"] if is_tied else [name]):
                part: Part = found[other]
                try:
                    expected = part.of(whole)
                except IndexError as wrong:
                    yield Difference(what, step, (rank,), name, hint=f"it is {wrong}")
                    return
                part.of(missing).fill_(False)
                if not part.tensor.numel():
                    continue
                actual = part.tensor.to(torch.float64)
                error = error_of(actual, expected.double(), scale.double())
                place = place_of(what, step, rank, name, part, actual, expected, whole)
                place = dataclasses.replace(place, error=error)
                if error_of is largest_error:
                    yield place
                elif (at := (part.start, part.tensor.shape)) not in parts or error >= parts[at][1].error:
                    parts[at] = part.tensor.numel(), place
        if parts:  # the error of the whole tensor: parts differ by chance
            square = sum(numel * place.error**2 for numel, place in parts.values())
            _, place = max(parts.values(), key=lambda each: each[1].error)
            yield dataclasses.replace(place, error=math.sqrt(square / sum(numel for numel, _ in parts.values())))
        if missing.any():
            index = tuple(missing.nonzero()[0].tolist())
            yield Difference(what, step, (), name, index, hint="no rank returned it")


def place_of(
    what: str, step: int, rank: int, name: str, part: Part, actual: Tensor, expected: Tensor, whole: Tensor
) -> Difference:
    """Describe the first element that differs visibly: by a thousandth of the largest error of this part."""
    apart = (actual - expected).abs().nan_to_num(math.inf)
    local = (apart >= apart.max() * 1e-3).nonzero()[0].tolist()
    if len(part.start) < whole.ndim:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(local[0] + part.start[0]), whole.shape))
    else:
        index = tuple(a + b for a, b in zip(local, part.start, strict=True))
    found, right = actual[tuple(local)].item(), expected[tuple(local)].item()
    factor = factor_of(actual, expected)
    hint = "" if factor is None or abs(factor - 1) < 1e-6 else f"all of it is {factor:.6g} times what it should be"
    return Difference(what, step, (rank,), name, index, found, right, hint=hint)


def factor_of(found: Tensor, right: Tensor) -> float | None:
    """Return the number by which all elements are multiplied, as after a forgotten mean; None if there is none."""
    counted = right.abs() > right.abs().max() * 1e-3
    quotients = (found[counted] / right[counted]).double()
    if not quotients.numel() or not torch.isfinite(quotients).all():
        return None
    factor = quotients.median().item()
    return factor if (quotients - factor).abs().max().item() <= 1e-6 * abs(factor) else None
