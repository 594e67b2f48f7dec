"""Check of puzzle 7: output and gradients of the MLP on one process, and the sums over the ranks."""

import re
from types import ModuleType

import torch
import torch.nn.functional as F

from puzzles.group import Group
from puzzles.pictures import Cell, verdicts
from puzzles.report import Misuse, Report
from puzzles.tensors import difference, randn

SIZES = (3,)
T, D, UNITS = 5, 4, 12


def check(learner: ModuleType, group: Group, report: Report) -> None:
    where = f"x ({T}, {D}), {UNITS} hidden units, loss y.square().sum()"
    report.begin(where)
    x, up, down = randn(T, D, seed=0), randn(UNITS, D, seed=1), randn(D, UNITS, seed=2)
    whole = [each.clone().requires_grad_() for each in (x, up, down)]
    y = F.silu(whole[0] @ whole[1].T) @ whole[2].T
    dx, dup, ddown = torch.autograd.grad(y.square().sum(), whole)

    n, rank = group.size, group.rank
    own = [each.clone().requires_grad_() for each in (x, up.chunk(n)[rank], down.chunk(n, 1)[rank])]

    def forward_and_backward() -> tuple[torch.Tensor, float]:
        result = learner.parallel_mlp(*own, group)
        forward = group.sent
        try:
            result.square().sum().backward()
        except RuntimeError as error:
            if found := re.search(
                r"(\w+)Backward returned an incorrect number of gradients \(expected (\d)", str(error)
            ):
                raise Misuse(f"{found[1]}.backward must return {found[2]} values, the gradient and None") from None
            raise
        return result, forward

    (result, in_forward), sent = group.call(forward_and_backward)
    part = F.silu(whole[0] @ up.chunk(n)[rank].T) @ down.chunk(n, 1)[rank].T
    (dx_part,) = torch.autograd.grad(part, whole[0], 2 * y.detach())
    unit = 2 * (n - 1) / n * T * D
    sums = {"forward": in_forward / unit, "backward": (sent - in_forward) / unit}
    expected = {
        "the output y": (result, y),
        "the gradient of x": (own[0].grad, dx),
        "the gradient of up": (own[1].grad, dup.chunk(n)[rank]),
        "the gradient of down": (own[2].grad, ddown.chunk(n, 1)[rank]),
    }
    right = {name: not difference(*pair) for name, pair in expected.items()}
    lines = [(f"all-reduces in {name}", [Cell(f"{count:g} x (T, D)", width=3)]) for name, count in sums.items()]
    report.picture = verdicts(f"Your MLP on {n} ranks", right, lines)
    mistakes = {"that is this rank's part, which nothing has summed over the ranks": dx_part}
    for name, (ours, reference) in expected.items():
        group.expect(ours, reference, where, name, mistakes=mistakes)
    group.require(
        sent <= 2.01 * unit, f"all results are right, but you send {sent / unit:g} times (T, D); twice suffices"
    )
