"""Backward in two halves: the gradient of a layer's input at once, as others wait for it, those of its weights later.

Most of a backward are two products per matrix, dx = dy W and dW = dy' x. In a `defer` only the first is computed, and
the second one is kept as a function to call (Qi et al. 2023, arXiv:2401.10241):

    with defer() as later:
        loss.backward()
    ...
    run(later)

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

Later = list[Callable[[], None]]

# The list of the innermost `defer`. No thread has its own: on a GPU, autograd works in another one.
_later: Later | None = None


@contextlib.contextmanager
def defer() -> Iterator[Later]:
    """Backwards in this context put off the weights' gradients. Yields the list that they end up in."""
    global _later
    before, _later = _later, []
    try:
        yield _later
    finally:
        _later = before


@torch.no_grad()
def run(later: Later) -> None:
    """Compute what was put off, and free what was kept for it."""
    while later:
        later.pop(0)()


def edges_of(weights: Sequence[Tensor]) -> list[GradientEdge]:
    """Where the weights' gradients go: their places in the graph, since activation checkpointing gives a backward only
    copies of the weights themselves. (In an evaluation there are none.)
    """
    return [get_gradient_edge(weight) for weight in weights if weight.requires_grad]


def is_deferring() -> bool:
    return _later is not None


def now_or_later(edges: Sequence[GradientEdge], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """For the backward of an autograd function: what it returns as the gradients of its weights.

    Args:
        edges: see `edges_of`.
        compute: the gradients of all these weights.
    """
    if _later is None:
        return compute()
    # A leaf's backward accumulates its gradient and calls its hooks as usual, and one that was computed from a leaf
    # passes it on.
    _later.append(lambda: torch.autograd.backward(edges, compute()))
    return [None] * len(edges)


class SplitProduct(torch.autograd.Function):
    """forward: y = x W'. backward: dx = dy W, and dW = dy' x now or later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edges = edges_of([weight])
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return dy @ weight, *now_or_later(ctx.edges, lambda: [dy.flatten(0, -2).t() @ x.flatten(0, -2)])


@torch.compiler.disable  # a compiler would join the halves again
def split_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with a backward that can be split."""
    y = SplitProduct.apply(x, weight)
    return y if bias is None else y + bias


def split_backward(model: nn.Module) -> None:
    """Let the backward of a model's linear layers be split, by exchanging their `product`. (Column-parallel ones can
    always do it.)
    """
    for module in model.modules():
        if hasattr(module, "product"):
            module.product = split_product
