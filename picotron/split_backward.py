"""Split a backward into two halves: input gradients now, because other stages wait for them, weight gradients later.

Most of a backward's time goes into two products per matrix, dx = dy W and dW = dy' x. Inside `defer_weight_grads` only
the first is computed; the second is kept as a function to call later (Qi et al. 2023, arXiv:2401.10241):

    with defer_weight_grads() as deferred:
        loss.backward()
    ...
    run_deferred(deferred)

What takes little time is computed at once: the gradients of norms, biases and embeddings, and that of the head, whose
product was part of forward (see `LinearCrossEntropy`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

DeferredGrads = list[Callable[[], None]]

# The list of the innermost `defer_weight_grads`. No thread has its own: on a GPU, autograd works in another one.
_deferred: DeferredGrads | None = None


@contextlib.contextmanager
def defer_weight_grads() -> Iterator[DeferredGrads]:
    """Backwards in this context put off the weights' gradients. Yields the list that they end up in."""
    global _deferred
    before, _deferred = _deferred, []
    try:
        yield _deferred
    finally:
        _deferred = before


@torch.no_grad()
def run_deferred(deferred: DeferredGrads) -> None:
    """Compute what was put off, and free what was kept for it."""
    while deferred:
        deferred.pop(0)()


def gradient_edges(weights: Sequence[Tensor]) -> list[GradientEdge]:
    """Where the weights' gradients go: their places in the graph, since activation checkpointing gives a backward only
    copies of the weights themselves. (In an evaluation there are none.)
    """
    return [get_gradient_edge(weight) for weight in weights if weight.requires_grad]


def is_deferring() -> bool:
    return _deferred is not None


def compute_or_defer(edges: Sequence[GradientEdge], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """For the backward of an autograd function: what it returns as the gradients of its weights.

    Args:
        edges: see `gradient_edges`.
        compute: the gradients of all these weights.
    """
    if _deferred is None:
        return compute()
    # A leaf's backward accumulates its gradient and calls its hooks as usual, and one that was computed from a leaf
    # passes it on.
    _deferred.append(lambda: torch.autograd.backward(edges, compute()))
    return [None] * len(edges)


class SplitLinear(torch.autograd.Function):
    """forward: y = x W'. backward: dx = dy W, and dW = dy' x now or later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edges = gradient_edges([weight])
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return dy @ weight, *compute_or_defer(ctx.edges, lambda: [dy.flatten(0, -2).t() @ x.flatten(0, -2)])


@torch.compiler.disable  # a compiler would join the halves again
def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with a backward that can be split."""
    y = SplitLinear.apply(x, weight)
    return y if bias is None else y + bias


def split_backward(model: nn.Module) -> None:
    """Let the backward of a model's linear layers be split, by exchanging their `linear_fn`. (Column-parallel ones can
    always do it.)
    """
    for module in model.modules():
        if hasattr(module, "linear_fn"):
            module.linear_fn = split_linear
