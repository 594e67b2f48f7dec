"""Solution of puzzle 1."""

import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group


def all_reduce(x: Tensor, group: Group) -> Tensor:
    padded = F.pad(x, (0, -len(x) % group.size))  # zeros do not change sums
    return group.all_gather(group.reduce_scatter(padded))[: len(x)]
