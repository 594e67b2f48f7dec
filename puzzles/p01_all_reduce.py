"""Puzzle 1, collectives: an all-reduce in two halves.

To read: docs/collectives.md, "An all-reduce is a reduce-scatter and an all-gather". Check your answer
with `python -m puzzles 1`.
"""

import torch
from torch import Tensor

from puzzles.group import Group


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' x, a vector of the same length P on every rank, without `group.all_reduce`.

    `group.reduce_scatter(y)` cuts y into `group.size` equal parts, sums each part over all ranks, and returns part
    number `group.rank` of the sum. `group.all_gather(z)` returns the z of all ranks, one after the other. Both return a
    new tensor, and both cut and join along the first dimension. P need not be divisible by the number of ranks.
    A rank may send no more than an all-reduce of P numbers (padding aside): 2 (n - 1)/n P.
    The rules of `group` are in puzzles/group.py, class `Group`: all tensors are float64.
    """
    raise NotImplementedError
