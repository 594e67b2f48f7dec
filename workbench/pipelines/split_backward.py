"""Split a backward into two halves: input gradients now, because other stages wait for them, weight gradients later.

Most of a backward's time is spent in two products per matrix y = x W', with W (outputs, inputs): dx = dy W and
dW = dy' x. Inside `defer_weight_grads`, only the first one is computed; the second one becomes a function to call later
(Qi et al. 2023, arXiv:2401.10241):

    split_backward(model)
    with defer_weight_grads() as deferred:
        loss.backward()
    ...
    run_deferred(deferred)

Gradients that take little time are never deferred: those of norms, biases and embeddings, and that of the head, whose
product was part of forward (see `LinearCrossEntropy`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from picotron.model.llama import Linear
from picotron.tensor_parallel.tensor_parallel import (
    ColumnParallel,
    ParallelProjections,
    RowParallelLinear,
    gradient_of_input,
)
from picotron.tensor_parallel.tp_communications import start_all_gather, start_sum

DeferredGrads = list[Callable[[], None]]

# The list of the innermost `defer_weight_grads`. Not thread-local, because on a GPU autograd runs in another thread.
_deferred: DeferredGrads | None = None


@contextlib.contextmanager
def defer_weight_grads() -> Iterator[DeferredGrads]:
    """Let backwards in this context defer the weights' gradients. Yields the list to which they are added."""
    global _deferred
    before, _deferred = _deferred, []
    try:
        yield _deferred
    finally:
        _deferred = before


@torch.no_grad()
def run_deferred(deferred: DeferredGrads) -> None:
    """Compute the deferred gradients, and free the tensors that were kept for them."""
    while deferred:
        deferred.pop(0)()


def gradient_edges(weights: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Return the weights' edges in the graph, to which their gradients go, or None for a weight that is frozen. (With
    activation checkpointing, the weights that a backward gets are copies without these edges.)
    """
    return [get_gradient_edge(weight) if weight.requires_grad else None for weight in weights]


def defer(edges: Sequence[GradientEdge | None], compute: Callable[[], Sequence[Tensor]]) -> None:
    """Add the gradients of some weights to the list of `defer_weight_grads`.

    Args:
        edges: edges of these weights, see `gradient_edges`.
        compute: function that returns the gradients of all of them.
    """
    assert _deferred is not None

    def accumulate() -> None:
        # From an edge, backward continues as usual: a leaf accumulates its gradient and calls its hooks, and a tensor
        # that was computed from a leaf passes its gradient on.
        gradients = [gradient for edge, gradient in zip(edges, compute(), strict=True) if edge]
        torch.autograd.backward([edge for edge in edges if edge], gradients)

    if any(edges):
        _deferred.append(accumulate)


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
        dx = dy @ weight.conj() if ctx.needs_input_grad[0] else None

        def dweight() -> Tensor:
            gradient, inputs = (each.reshape(-1, each.size(-1)) for each in (dy, x))
            return gradient.t() @ inputs.conj()

        # x without a gradient can be a buffer, which the next forward changes. A gradient that itself has a graph is a
        # part of a forward that activation checkpointing repeats, as of a gradient penalty.
        if _deferred is None or dx is None or torch.is_grad_enabled():
            return dx, dweight() if ctx.needs_input_grad[1] else None
        defer(ctx.edges, lambda: [dweight()])
        return dx, None


@torch.compiler.disable  # torch.compile would join the two halves again
def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply `torch.nn.functional.linear` with a backward that can be split. That of a computed weight, such as of a
    parametrization, is not: its graph is freed by the first half. Nor is one in a transform of torch.func.
    """
    if not weight.is_leaf or torch._C._are_functorch_transforms_active():
        return F.linear(x, weight, bias)
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # casts are a part of the graph
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = SplitLinear.apply(x, weight)
    return y if bias is None else y + bias


class SplitColumnParallel(ColumnParallel):
    """`ColumnParallel` whose weight gradients can be deferred. They gather x again when it is their turn."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.edges, ctx.splits = gradient_edges(weights), all(weight.is_leaf for weight in weights)  # see `split_linear`
        return ColumnParallel.forward(ctx, x, group, sequence_parallel, *weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if _deferred is None or not ctx.splits:
            return ColumnParallel.backward(ctx, *gradients)
        x, *weights = ctx.saved_tensors
        dys = [gradient.flatten(0, 1) for gradient in gradients]  # (B * T, outputs/tp)
        dx = gradient_of_input(dys, weights).view(*gradients[0].shape[:2], -1)  # (B, T, D), partial
        finish_dx = start_sum(dx, ctx.group, ctx.sequence_parallel)

        def dweights() -> list[Tensor]:
            full_x = start_all_gather(x, ctx.group)() if ctx.sequence_parallel else x
            return [dy.t() @ full_x.flatten(0, 1) for dy in dys]

        defer(ctx.edges, dweights)
        return finish_dx(), None, None, *[None] * len(weights)


def split_backward(model: nn.Module) -> None:
    """Let the backward of a model's linear layers be split."""
    for module in model.modules():
        if isinstance(module, (Linear, RowParallelLinear)):
            module.product = split_linear
        elif isinstance(module, ParallelProjections):
            module.function = SplitColumnParallel
        # A subclass of others may compute something else.
        elif type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return split_linear(x, linear.weight, linear.bias)
