"""Check of puzzle 4: the gradient that one process computes from all micro-batches at once."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from docs.programs.svg import colour_of
from puzzles.group import Group
from puzzles.pictures import Cell, rows
from puzzles.report import Report
from puzzles.tensors import generator, randn

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
    # Equal micro-batches come first: a mean of means is right there, and a sum of means is not.
    for targets in ([[6, 6], [6, 6]], [[6, 1], [2, 5]], [[6, 0], [2, 5]], TARGETS):
        where = f"micro-batches with {' and '.join(map(str, targets))} targets on ranks 0 and 1"
        report.begin(where)
        lines = [
            (f"rank {rank}", [Cell(str(count), colour_of(i), max(count, 0.5) / 3) for i, count in enumerate(counts)])
            for rank, counts in enumerate(targets)
        ]
        report.picture = rows("Targets of each micro-batch that are not padding", lines)
        batches, w = micro_batches(targets), randn(V, D, seed=99).requires_grad_()
        x, ids = (torch.cat(each) for each in zip(*(batch for rank in batches for batch in rank), strict=True))
        F.cross_entropy(x @ w.T, ids).backward()
        assert w.grad is not None
        result, sent = group.call(learner.mean_gradient, w, batches[group.rank], group)
        group.expect(result, w.grad, where, "gradient")
        share = 2 * (group.size - 1) / group.size
        enough = "sum the gradients of all micro-batches before you send them"
        count = f"{sent:g} numbers are sent, instead of {share * (V * D + 1):g}"
        group.require(sent <= share * (V * D + 4), f"{where}: the gradient is right, but {count}; {enough}")
