"""Linear layers whose backward can be split, see `picotron.model.split_backward`."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron.model.linear import Linear, Products
from picotron.model.split_backward import compute_or_defer, gradient_edges
from picotron.tensor_parallel.tensor_parallel import RowParallelLinear


class SplitLinear(torch.autograd.Function):
    """forward: y = x W'. backward: dx = dy W now, and dW = dy' x now or deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edges = gradient_edges([weight])
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = [each.reshape(-1, each.size(-1)) for each in (dy, x)]
        return dy @ weight, *compute_or_defer(ctx.edges, lambda: [rows[0].t() @ rows[1]])


@torch.compiler.disable  # torch.compile would join the two halves again
def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply `torch.nn.functional.linear` with a backward that can be split."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # casts are a part of the graph
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = SplitLinear.apply(x, weight)
    return y if bias is None else y + bias


class SplitProducts(Products):
    linear = staticmethod(split_linear)


def split_backward(model: nn.Module) -> None:
    """Let the backward of a model's linear layers be split. (That of column-parallel layers always can be.)"""
    for module in model.modules():
        if isinstance(module, (Linear, RowParallelLinear)):
            module.products = SplitProducts
        elif type(module) is nn.Linear:  # a subclass may compute something else
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return split_linear(x, linear.weight, linear.bias)
