"""Solution of puzzle 7: f and g in Shoeybi et al. 2019 (arXiv:1909.08053)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor, group: Group) -> Tensor:
    x = enter(x, group)
    return leave(F.silu(x @ up.T) @ down.T, group)


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Tensor:
        ctx.group, ctx.communicate = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.communicate(gradient, ctx.group), None, None, None


def copy(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    return group.all_reduce(x)


def enter(x: Tensor, group: Group) -> Tensor:
    return Pair.apply(x, group, copy, all_reduce)  # each rank's units contribute to the gradient of x


def leave(y: Tensor, group: Group) -> Tensor:
    return Pair.apply(y, group, all_reduce, copy)  # the derivative of a sum with respect to each of its terms is 1
