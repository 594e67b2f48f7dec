"""Check of puzzle 4: the gradient that one process computes from all micro-batches at once."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import Cell, colour_of, rows
from puzzles.report import Report, generator, randn

SIZES = (2,)
V, D, T = 5, 3, 6
TARGETS = [[6, 1], [2, 5, 3]]  # of each micro-batch of each rank that are not padding


def micro_batches(targets: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    ranks = []
    for rank, counts in enumerate(targets):
        batches = []
        for i, count in enumerate(counts):
            ids = torch.randint(V, (T,), generator=generator(10 * rank + i))
            ids[count:] = -100
            batches.append((randn(T, D, seed=10 * rank + i), ids))
        ranks.append(batches)
    return ranks


def check(learner: ModuleType, group: Group, report: Report) -> None:
    lines = [
        (f"rank {rank}", [Cell(str(count), colour_of(i), count / 3) for i, count in enumerate(counts)])
        for rank, counts in enumerate(TARGETS)
    ]
    report.picture = rows("Targets of each micro-batch that are not padding", lines)
    # Equal micro-batches come first: a mean of means is right there, and a sum of means is not.
    for targets in ([[6, 6], [6, 6]], [[6, 1], [2, 5]], TARGETS):
        batches, w = micro_batches(targets), randn(V, D, seed=99)
        full = w.clone().requires_grad_()
        x, ids = (torch.cat(each) for each in zip(*(batch for rank in batches for batch in rank), strict=True))
        F.cross_entropy(x @ full.T, ids).backward()
        assert full.grad is not None
        own = [(x.clone(), ids.clone()) for x, ids in batches[group.rank]]
        result, sent = group.call(learner.mean_gradient, w.clone().requires_grad_(), own, group)
        where = f"micro-batches with {' and '.join(map(str, targets))} targets on rank 0 and 1"
        group.expect(result, full.grad, where, "gradient")
        most = 2 * (group.size - 1) / group.size * (V * D + 4)
        enough = "sum the gradients of all micro-batches before you send them"
        group.require(sent <= most, f"{where}: the gradient is right, but {sent:g} numbers are sent; {enough}")
