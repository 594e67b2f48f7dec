"""Checks of narrow dtypes besides the distance of each tensor from the exact one, which hides what is a little wrong.

Roundings are independent of each other, so that they hardly change the projection of a gradient on the exact one: a
factor shows there. And the optimizer computes in float32, so that the norm of the trainer's own gradients and the
weights that clipping and AdamW make of them are known to seven digits, however far they are from the exact ones.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.case import Case
from conformance.compare import Difference, Key, Limits, mean_error
from conformance.reference import Reference, adamw
from conformance.result import Result

UNIT = torch.finfo(torch.float32).eps
FEW, MANY = 16, 512  # numbers from which bits are no accident, and numbers that are enough
FACTORS = {"gradients": "gradient", "updates": "update"}  # kinds of factors, see `factors_of`
Gradients = Sequence[Mapping[str, Tensor]]  # of each step
Steps = tuple[Case, list[dict[str, Tensor]], dict[str, Tensor]]  # of a run: its gradients of each step, its weights


def check_precision(
    parts: Sequence[tuple[Case, Sequence[Result]]], right: Reference, limits: Limits
) -> Difference | None:
    """Return the first number that a narrow dtype does not explain, or None.

    Args:
        parts: the cases of a run up to the one to check, each of which resumes from the one before, and their results.
        right: the reference of the last one.
    """
    (case, results), runs = parts[-1], [joined(*each, right) for each in parts]
    _, gradients, weights = runs[-1]
    found = [*of_bits(case, gradients), *of_norms(case, gradients, results)]
    if all(len(each) == len(part.steps) for part, each, _ in runs):
        found += of_weights(runs, right.initial)
    factors = factors_of(case, gradients, weights, right)
    for (what, name, step), factor in (factors | means_of(factors, limits)).items():
        subject = "it is" if name else "all of them together are"
        hint = f"{subject} {1 + factor:.6g} times what it should be, rounding aside"
        place = Difference(FACTORS[what] if name else what, step, (), name, error=abs(factor), hint=hint)
        found.append(dataclasses.replace(place, bound=limits[what, name, step]))
    return next((each for each in found if not each.error <= each.bound), None)


def joined(case: Case, results: Sequence[Result], right: Reference) -> Steps:
    """Join the gradients and weights of all ranks to whole tensors."""

    def whole(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, part in (each for parts in of_ranks for each in parts.items()):
            name = name if name in right.initial else "model.embed_tokens.weight"  # of a tied head
            part.of(found.setdefault(name, torch.zeros_like(right.initial[name]))).copy_(part.tensor)
        return found

    gradients = [
        whole(each.gradients[i] for each in results if i < len(each.gradients)) for i in range(len(case.steps))
    ]
    return case, list(filter(None, gradients)), whole(each.weights for each in results)


def projection(found: Tensor, right: Tensor) -> float:
    return ((found * right).sum() / right.square().sum()).item()


def factors_of(case: Case, gradients: Gradients, weights: Mapping[str, Tensor], right: Reference) -> dict[Key, float]:
    """Return the projection of each gradient and update on the right one, less 1."""
    both: list[Any] = [
        ("gradients", step + 1, *each) for step, *each in zip(case.steps, gradients, right.gradients, strict=False)
    ]
    updates, rights = ({n: x - right.initial[n] for n, x in each.items()} for each in (weights, right.weights))
    return {
        (what, name, step): projection(x, exact[name]) - 1
        for what, step, found, exact in (*both, ("updates", case.last_step, updates, rights))
        for name, x in found.items()
        if exact[name].any()
    }


def means_of(factors: Mapping[Key, float], limits: Limits) -> dict[Key, float]:
    """Return the weighted means of the factors of each step: those that vary least tell most."""
    sums = dict[Key, Tensor]()
    for (what, name, step), factor in factors.items():
        if what in FACTORS:
            share = limits[f"spread of {what}", name, step] ** -2
            sums[what, "", step] = sums.get((what, "", step), torch.zeros(2)) + share * torch.tensor([factor, 1.0])
    return {key: float(total / shares) for key, (total, shares) in sums.items()}


def of_bits(case: Case, gradients: Gradients) -> Iterator[Difference]:
    """Check that gradients that are sums over ranks or micro-batches have more bits than the narrow dtype, see
    `is_narrow`. The gradient of an expert may be a single product over the tokens of all ranks.
    """
    terms = {False: case.sizes["dp"] * case.sizes["cp"] * case.micro_batches, True: case.micro_batches}
    for step, found in zip(case.steps, gradients if case.torch_dtype != case.weight_dtype else (), strict=False):
        sums = {name: x for name, x in found.items() if terms[".experts." in name] > 1}
        for name in (name for name, x in sums.items() if is_narrow(x, case.torch_dtype)):
            hint = f"it has no more bits than {case.dtype}, in which it is added or sent, or in which its weight is"
            yield Difference("gradient", step + 1, (), name, hint=hint)


def is_narrow(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether all numbers of a tensor in float32 have the bits of a narrower dtype, perhaps times one factor, by which
    they were divided afterwards. The first one then has one of few mantissas, and each says what the factor is.
    """
    x = x[x != 0].double()
    x, count = x[:: -(-len(x) // MANY) or 1], round(1 / torch.finfo(dtype).eps)
    if len(x) < FEW:
        return False
    mantissas = torch.frexp(x[:, None] / x[0] * torch.arange(count, 2 * count)).mantissa.abs() * 2 * count
    apart = (mantissas - mantissas.round()).abs()
    return bool((apart <= 4 * count * UNIT).double().mean(0).max() > 0.9)


def of_norms(case: Case, gradients: Gradients, results: Sequence[Result]) -> Iterator[Difference]:
    for step, found in enumerate(gradients):
        norm = nn.utils.get_total_norm([*found.values()]).item()
        for rank, result in enumerate(results):
            for value in result.grad_norms[step : step + 1]:
                yield Difference(
                    "gradient norm", case.first_step + step + 1, (rank,), "", (), value, norm, abs(value / norm - 1),
                    64 * UNIT, "that of the trainer's own gradients",
                )  # fmt: skip


def of_weights(parts: Sequence[Steps], initial: Mapping[str, Tensor]) -> Iterator[Difference]:
    """Check that clipping and AdamW make the weights of the last part of a run from its gradients, beginning with the
    weights that the trainer has saved, and the moments that it should have saved. The bound is that of rounding each
    step to float32.
    """
    (case, _, weights), parameters = parts[-1], {name: nn.Parameter(x.double().clone()) for name, x in initial.items()}
    optimizer, limit = adamw(parameters.values(), case), math.inf if case.max_grad_norm is None else case.max_grad_norm
    for part, gradients, saved in parts:
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for step, found in zip(part.steps, gradients, strict=True):
            for name, p in parameters.items():
                p.grad = found[name].double().clone() if name in found else None
            nn.utils.clip_grad_norm_(parameters.values(), limit)
            for group in optimizer.param_groups:
                group["lr"] = case.learning_rates[step]
            optimizer.step()
        updates = {name: p.detach() - before[name] for name, p in parameters.items()}
        for name, x in saved.items():
            parameters[name].data.copy_(x)
    for name, x in weights.items():
        update, expected = x.double() - before[name], updates[name]
        rounding = UNIT * before[name].square().mean().sqrt().item() * len(case.steps)
        bound = 64 * UNIT + 4 * rounding / max(expected.square().mean().sqrt().item(), rounding)
        hint = f"its update is {projection(update, expected):.6g} times AdamW's of the trainer's own gradients"
        hint += f" since the checkpoint of step {case.first_step}" if case.first_step else ""
        error = mean_error(update, expected, expected)
        yield Difference("weight", case.last_step, (), name, error=error, bound=bound, hint=hint)
