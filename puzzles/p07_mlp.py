"""Puzzle 7, tensor: the two pairs of a parallel MLP.

To read: docs/tensor_parallel.md, "Why a copy sums in the backward pass". Check your answer with `python -m puzzles 7`.
"""

from collections.abc import Callable
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
    x = enter(x, group)
    return leave(F.silu(x @ up.T) @ down.T, group)


class Pair(torch.autograd.Function):
    """forward: a function of (tensor, group). backward: the function that its gradient needs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Tensor:
        """Return `forward` of x. Save what backward needs in ctx, for example: ctx.group = group."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, given that of forward's result; and None for each of the three other arguments."""
        raise NotImplementedError


def enter(x: Tensor, group: Group) -> Tensor:
    """Return what the column-parallel matrix multiplies: `Pair.apply` with two functions of your choice.

    `group.all_reduce(y)` returns the sum of y over all ranks.
    """
    raise NotImplementedError


def leave(y: Tensor, group: Group) -> Tensor:
    """Return the output, given the product of the row-parallel matrix."""
    raise NotImplementedError
