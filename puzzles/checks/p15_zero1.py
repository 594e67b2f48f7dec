"""Check of puzzle 15: three steps of torch's AdamW on one process, and the numbers that a rank keeps and sends."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import PALE, Cell, rows
from puzzles.report import RED, Report, Wrong
from puzzles.tensors import randn

SIZES = (3,)
P = 200
STEPS = 3


def kept(value: Any, seen: set[int]) -> int:
    """Count the numbers of all tensors in a state, in optimizers and lists, too, but views of one tensor once."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        own = 0 if storage.data_ptr() in seen else storage.nbytes() // 8
        seen.add(storage.data_ptr())
        return own + (0 if value.grad is None else kept(value.grad, seen))
    if isinstance(value, torch.optim.Optimizer):
        return kept([value.param_groups, list(value.state.values())], seen)
    if isinstance(value, dict):
        return kept(list(value.values()), seen)
    return sum(kept(each, seen) for each in value) if isinstance(value, list | tuple | set) else 0


def check(learner: ModuleType, group: Group, report: Report) -> None:
    n, full = group.size, torch.nn.Parameter(randn(P, seed=0))
    optimizer = torch.optim.AdamW([full], lr=0.1, weight_decay=0.1)
    wrong = {
        "the decay of the weights is missing": torch.optim.AdamW([full.detach().clone()], 0.1, weight_decay=0),
        "the decay is added to the gradient, as in Adam": torch.optim.Adam(
            [full.detach().clone()], 0.1, weight_decay=0.1
        ),
        "both moments are corrected as in step 1": torch.optim.AdamW([full.detach().clone()], 0.1, weight_decay=0.1),
    }
    w, state = full.detach().clone(), dict[str, Any]()
    for number in range(1, STEPS + 1):
        report.begin(f"step {number}, {P} weights")
        gradients = randn(n, P, seed=number)
        full.grad = gradients.mean(0)
        optimizer.step()
        mistakes = {}
        for kind, other in wrong.items():
            (copy,) = other.param_groups[0]["params"]
            copy.copy_(w)
            copy.grad = full.grad
            if kind.endswith("1") and number > 1:
                other.state[copy]["step"].zero_()
            other.step()
            mistakes[kind] = copy.clone()
        result, sent = group.call(learner.step, w, gradients[group.rank], state, group)
        report.picture = draw(result, full.detach(), n, number)
        try:
            group.expect(result, full.detach(), report.case, "weights", mistakes=mistakes)
        except Wrong as error:
            comparable = isinstance(result, Tensor) and result.shape == full.shape and result.dtype == full.dtype
            if not comparable or not torch.allclose(result, full.detach(), rtol=1e-4, atol=1e-4):
                raise
            why = (
                "AdamW hides a constant factor in the gradients: is this the update for their mean, not for their sum?"
            )
            raise Wrong(f"{error}; nearly right: {why}") from None
        numbers, most = kept(state, set()), 4 * (-(-P // n)) + 16  # a copy of a slice, its gradient and two moments
        sentence = f"{group.here}step {number}: the state holds {numbers} numbers; 4 x {-(-P // n)} suffice: this rank's slice of the weights, of their gradient and of both moments"
        views = "a view keeps all of its tensor: clone it"
        group.require(numbers <= most, f"the weights are right, but on {sentence} ({views})")
        enough = 2 * (n - 1) / n * (P + n)
        group.require(sent <= enough, f"the weights are right, but a rank sends {sent:g} numbers; {enough:g} suffice")
        w = result.detach().clone()


def draw(result: Any, expected: Tensor, n: int, step: int) -> str:
    """Draw ranges of weights, red where any differs."""
    ours = result.detach() if isinstance(result, Tensor) and result.shape == expected.shape else expected * torch.nan
    right = (ours - expected).abs() <= 1e-9 * expected.abs().max()
    cells = [Cell("", PALE if part.all() else RED, 0.25, f"{int((~part).sum())} wrong") for part in right.chunk(24)]
    return rows(f"The {P} weights on rank 0 of {n} after step {step}", [("weights 0, 1, ...", cells)], "Red: wrong.")
