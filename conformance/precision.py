"""Checks of narrow dtypes besides the distance of each tensor from the exact one, which hides what is a little wrong.

Roundings are independent of each other, so that they hardly change the projection of all gradients on the exact ones: a
factor that they have in common shows there. And the optimizer computes in float32, so that the norm of the trainer's
own gradients and the weights that AdamW makes of them are known to seven digits, however far they are from the exact
ones.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.case import Case
from conformance.compare import Difference, Key, Limits, mean_error
from conformance.reference import Reference, adamw
from conformance.result import Result

UNIT = torch.finfo(torch.float32).eps
MANY = 10_000  # numbers from which few different mantissas are no accident
Factors = dict[Key, dict[str, float]]


def check_precision(case: Case, results: Sequence[Result], right: Reference, limits: Limits) -> Difference | None:
    """Return the first number that a narrow dtype does not explain, or None."""
    steps = min(max(sum(map(bool, each.gradients)) for each in results), len(right.losses))
    gradients = [
        joined([each.gradients[i] for each in results if i < len(each.gradients)], right) for i in range(steps)
    ]
    weights = joined([each.weights for each in results], right)
    found = [*of_bits(case, gradients), *of_norms(gradients, results)]
    if steps == len(case.steps) and case.load is None:
        found += of_weights(case, gradients, weights, right)
    found += of_factors(gradients, weights, right, limits)
    return next((each for each in found if not each.error <= each.bound), None)


def joined(of_ranks: Sequence[Mapping[str, Any]], right: Reference) -> dict[str, Tensor]:
    """Join the parts of all ranks to whole tensors."""
    found = dict[str, Tensor]()
    for parts in of_ranks:
        for name, part in parts.items():
            name = name if name in right.initial else "model.embed_tokens.weight"  # of a tied head
            whole = found.setdefault(name, torch.zeros_like(right.initial[name]))
            part.of(whole).copy_(part.tensor)
    return found


def projection(found: Tensor, right: Tensor) -> float:
    return ((found * right).sum() / right.square().sum()).item()


def factors_of(gradients: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor], right: Reference) -> Factors:
    """Return the projection of each gradient and update on the right one, less 1, by kind and step."""
    found: Factors = {}
    for step, each in enumerate(gradients):
        found["gradient", step + 1] = factors_between(each, right.gradients[step])
    updates, rights = ({n: x - right.initial[n] for n, x in each.items()} for each in (weights, right.weights))
    return found | {("update", len(right.losses)): factors_between(updates, rights)}


def factors_between(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: projection(x, right[name]) - 1 for name, x in found.items() if right[name].any()}


def bias(factors: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Return the weighted mean of factors: those that vary least tell most."""
    return sum(shares[name] * factor for name, factor in factors.items()) / sum(shares[name] for name in factors)


def of_factors(
    gradients: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor], right: Reference, limits: Limits
) -> Iterator[Difference]:
    for key, factors in factors_of(gradients, weights, right).items():
        found = bias(factors, limits.shares[key])
        hint = f"all of them together are {1 + found:.6g} times what they should be"
        yield Difference(f"{key[0]}s", key[1], error=abs(found), bound=limits.biases[key], hint=hint)


def of_bits(case: Case, gradients: Sequence[Mapping[str, Tensor]]) -> Iterator[Difference]:
    """Check that gradients that are sums over ranks or micro-batches have more bits than the narrow dtype. Their
    mantissas tell, even if all of them were divided by one number afterwards.
    """
    allowed = round(2 / torch.finfo(case.torch_dtype).eps)
    are_sums = case.sizes["dp"] * case.sizes["cp"] * case.micro_batches > 1 and case.torch_dtype != case.weight_dtype
    for step, found in enumerate(gradients) if are_sums else ():
        numbers = torch.cat([x[x != 0] for x in found.values()])
        if len(numbers) >= MANY:
            different = len(torch.frexp(numbers.float().abs()).mantissa.unique())
            hint = f"all of them have one of {different} mantissas: they are added or sent in {case.dtype}"
            yield Difference("gradients", step + 1, error=math.inf if different <= allowed else 0.0, hint=hint)


def of_norms(gradients: Sequence[Mapping[str, Tensor]], results: Sequence[Result]) -> Iterator[Difference]:
    for step, found in enumerate(gradients):
        norm = nn.utils.get_total_norm([*found.values()]).item()
        for rank, result in enumerate(results):
            for value in result.grad_norms[step : step + 1]:
                yield Difference(
                    "gradient norm", step + 1, (rank,), "", (), value, norm, abs(value / norm - 1), 64 * UNIT,
                    "that of the trainer's own gradients",
                )  # fmt: skip


def of_weights(
    case: Case, gradients: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor], right: Reference
) -> Iterator[Difference]:
    """Check that AdamW makes the weights from the gradients. The bound is that of rounding each step to float32."""
    own = {name: nn.Parameter(x.double().clone()) for name, x in right.initial.items()}
    optimizer = adamw(own.values(), case)
    for step, found in zip(case.steps, gradients, strict=True):
        for name, p in own.items():
            p.grad = found[name].double() if name in found else None
        for group in optimizer.param_groups:
            group["lr"] = case.learning_rates[step]
        optimizer.step()
    for name, x in weights.items():
        update, expected = x - right.initial[name], own[name].detach() - right.initial[name]
        rounding = UNIT * right.initial[name].square().mean().sqrt().item() * len(case.steps)
        bound = 64 * UNIT + 4 * rounding / max(expected.square().mean().sqrt().item(), rounding)
        hint = f"its update is {projection(update, expected):.6g} times AdamW's of the trainer's own gradients"
        error = mean_error(update, expected, expected)
        yield Difference("weight", case.last_step, (), name, error=error, bound=bound, hint=hint)
