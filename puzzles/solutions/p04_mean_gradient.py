"""Solution of puzzle 4."""

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group


def mean_gradient(w: Tensor, micro_batches: list[tuple[Tensor, Tensor]], group: Group) -> Tensor:
    w = w.detach().requires_grad_()
    count = torch.zeros(1, dtype=torch.float64)
    for x, targets in micro_batches:
        F.cross_entropy(x @ w.T, targets, reduction="sum").backward()  # adds to w.grad
        count += (targets != -100).sum()
    assert w.grad is not None
    return group.all_reduce(w.grad) / group.all_reduce(count)  # a sum of sums, over the number of targets
