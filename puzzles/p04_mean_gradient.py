"""Puzzle 4, data: one gradient from micro-batches of different lengths.

To read: docs/training_step.md, "The step in code". Check your answer with `python -m puzzles 4`.
"""

import torch
from torch import Tensor

from puzzles.group import Group


def mean_gradient(w: Tensor, micro_batches: list[tuple[Tensor, Tensor]], group: Group) -> Tensor:
    """Return the gradient with respect to w (V, D) of the mean loss over all targets of all ranks: (V, D).

    w is the same on all ranks, a leaf that requires a gradient. Each rank has its own list of micro-batches
    (x, targets), with x (T, D) and targets (T,). The logits are x @ w.T, and their loss is
    `torch.nn.functional.cross_entropy`, which ignores targets of -100: padding. So micro-batches have different numbers
    of targets, and ranks different numbers of micro-batches. `group.all_reduce(y)` returns the sum of y over all ranks.
    All numbers are float64. Send the gradient once per step, not once per micro-batch.
    """
    raise NotImplementedError
