"""Solution of puzzle 8."""

import torch
from torch import Tensor

from puzzles.group import Group


def cross_entropy(logits: Tensor, targets: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    T, width = logits.shape
    largest = group.all_reduce(logits.amax(1), "max")
    exponentials = (logits - largest[:, None]).exp()
    column = targets - group.rank * width
    here = (column >= 0) & (column < width)
    column, tokens = column.clamp(0, width - 1), torch.arange(T)
    target_logit = torch.where(here, logits[tokens, column] - largest, 0.0)
    total, target_logit = group.all_reduce(torch.stack([exponentials.sum(1), target_logit]))
    gradient = exponentials / total[:, None]
    gradient[tokens, column] -= here.double()
    return total.log() - target_logit, gradient
