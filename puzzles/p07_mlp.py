"""Puzzle 7, tensor: the two autograd functions of a parallel MLP.

To read: docs/tensor_parallel.md, "Why a copy sums in the backward pass". Check your answer with `python -m puzzles 7`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor, group: Group) -> Tensor:
    """Return y = silu(x @ up.T) @ down.T, the same on all ranks: (T, D). This function is complete.

    x (T, D) is the same on all n ranks. Each has F/n of the hidden units: its rows of up (F/n, D), and its columns of
    down (D, F/n). The gradients of x, of these rows and of these columns must equal those of one
    process. A rank may send at most two all-reduces of (T, D), forward and backward together.
    """
    x = Enter.apply(x, group)
    return Leave.apply(F.silu(x @ up.T) @ down.T, group)


class Enter(torch.autograd.Function):
    """Applied before the column-parallel matrix. `group.all_reduce(y)` returns the sum of y over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Return what the matrix multiplies. Save what backward needs in ctx: ctx.group = group."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, given that of forward's result; and None, because a group has no gradient."""
        raise NotImplementedError


class Leave(torch.autograd.Function):
    """Applied after the row-parallel matrix."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError
