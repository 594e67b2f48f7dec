"""Checks of narrow dtypes besides the distance of each tensor from the exact one, which hides what is a little wrong.

Roundings are independent of each other, so that they hardly change the projection of a gradient on the exact one: a
factor shows there. And the optimizer computes in float32, so that the norm of the trainer's own gradients and the
weights that clipping and AdamW make of them are known to seven digits, however far they are from the exact ones.
"""

import dataclasses
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
FEW, MANY = 16, 512  # numbers from which bits are no accident, and numbers that are enough
FACTORS = {"gradients": "gradient", "updates": "update"}  # kinds of factors, see `factors_of`


class Replay:
    """AdamW of a trainer's own gradients, from step to step, also of a run that resumes: its weights begin as those
    that the trainer has saved, and its moments are those that the trainer should have saved.
    """

    def __init__(self, case: Case, initial: Mapping[str, Tensor]) -> None:
        self.weights = {name: nn.Parameter(x.double().clone()) for name, x in initial.items()}
        self.optimizer, self.next_step = adamw(self.weights.values(), case), 0

    def train(self, case: Case, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take the steps of a case, and return the updates of the weights."""
        before = {name: p.detach().clone() for name, p in self.weights.items()}
        for step, found in zip(case.steps, gradients, strict=True):
            for name, p in self.weights.items():
                p.grad = found[name].double().clone() if name in found else None
            nn.utils.clip_grad_norm_(
                self.weights.values(), math.inf if case.max_grad_norm is None else case.max_grad_norm
            )
            for group in self.optimizer.param_groups:
                group["lr"] = case.learning_rates[step]
            self.optimizer.step()
        self.next_step = case.last_step
        return {name: p.detach() - before[name] for name, p in self.weights.items()}


def check_precision(
    case: Case, results: Sequence[Result], right: Reference, limits: Limits, replay: Replay | None
) -> tuple[Difference | None, Replay | None]:
    """Return the first number that a narrow dtype does not explain, or None.

    Args:
        replay: that of the run from which the case resumes; None: the case is the beginning of a run, or no such run
            returned the gradients of all steps.

    Returns:
        That number, and the replay for a case that resumes from this one.
    """
    steps = min(max(sum(map(bool, each.gradients)) for each in results), len(right.losses))
    gradients = [
        joined([each.gradients[i] for each in results if i < len(each.gradients)], right) for i in range(steps)
    ]
    weights = joined([each.weights for each in results], right)
    found = [*of_bits(case, gradients), *of_norms(case, gradients, results)]
    replay = Replay(case, right.initial) if case.first_step == 0 else replay
    if steps == len(case.steps) and replay is not None and replay.next_step == case.first_step:
        found += of_weights(case, gradients, weights, replay)
    else:
        replay = None
    factors = factors_of(case, gradients, weights, right)
    for (what, name, step), factor in (factors | means_of(factors, limits)).items():
        subject = "it is" if name else "all of them together are"
        hint = f"{subject} {1 + factor:.6g} times what it should be, rounding aside"
        place = Difference(FACTORS[what] if name else what, step, (), name, error=abs(factor), hint=hint)
        found.append(dataclasses.replace(place, bound=limits[what, name, step]))
    return next((each for each in found if not each.error <= each.bound), None), replay


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


def factors_of(
    case: Case, gradients: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor], right: Reference
) -> dict[Key, float]:
    """Return the projection of each gradient and update on the right one, less 1."""
    both = [("gradients", step + 1, *each) for step, *each in zip(case.steps, gradients, right.gradients, strict=False)]
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


def of_bits(case: Case, gradients: Sequence[Mapping[str, Tensor]]) -> Iterator[Difference]:
    """Check that gradients that are sums over ranks or micro-batches have more bits than the narrow dtype, see
    `is_narrow`.
    """
    are_sums = case.sizes["dp"] * case.sizes["cp"] * case.micro_batches > 1 and case.torch_dtype != case.weight_dtype
    for step, found in zip(case.steps, gradients if are_sums else (), strict=False):
        for name in (name for name, x in found.items() if is_narrow(x, case.torch_dtype)):
            hint = f"it has no more bits than {case.dtype}, in which it is added or sent"
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


def of_norms(case: Case, gradients: Sequence[Mapping[str, Tensor]], results: Sequence[Result]) -> Iterator[Difference]:
    for step, found in enumerate(gradients):
        norm = nn.utils.get_total_norm([*found.values()]).item()
        for rank, result in enumerate(results):
            for value in result.grad_norms[step : step + 1]:
                yield Difference(
                    "gradient norm", case.first_step + step + 1, (rank,), "", (), value, norm, abs(value / norm - 1),
                    64 * UNIT, "that of the trainer's own gradients",
                )  # fmt: skip


def of_weights(
    case: Case, gradients: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor], replay: Replay
) -> Iterator[Difference]:
    """Check that clipping and AdamW make the weights from the gradients. The bound is that of rounding each step to
    float32. The replay goes on with the trainer's weights.
    """
    before = {name: p.detach().clone() for name, p in replay.weights.items()}
    updates = replay.train(case, gradients)
    for name, x in weights.items():
        update, expected = x.double() - before[name], updates[name]
        rounding = UNIT * before[name].square().mean().sqrt().item() * len(case.steps)
        bound = 64 * UNIT + 4 * rounding / max(expected.square().mean().sqrt().item(), rounding)
        hint = f"its update is {projection(update, expected):.6g} times AdamW's of the trainer's own gradients"
        error = mean_error(update, expected, expected)
        replay.weights[name].data.copy_(x)
        yield Difference("weight", case.last_step, (), name, error=error, bound=bound, hint=hint)
