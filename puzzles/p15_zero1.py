"""Puzzle 15, sharding: an optimizer of which each rank has a slice (ZeRO-1).

To read: docs/zero.md, "The algorithms". Check your answer with `python -m puzzles 15`.
"""

from typing import Any

import torch
from torch import Tensor

from puzzles.group import Group


def step(w: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return the weights after a step of `torch.optim.AdamW` with lr=0.1, weight_decay=0.1 and otherwise its defaults.

    w (P,) holds all weights of the model, the same on all ranks. The ranks have seen different data, so their gradients
    (P,) differ: the step uses their mean. Each rank updates only its own slice of the weights, about P/n of them, and
    keeps the moments of no others: `state` is a dictionary in which you keep what you need for the next step. It is
    empty at first. P need not be divisible by the number of ranks.

    `group.reduce_scatter` and `group.all_gather` are those of puzzle 1. A rank may send at most as much as one
    all-reduce of P numbers, 2 (n - 1)/n P.
    """
    raise NotImplementedError
