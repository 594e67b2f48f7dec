"""Split a backward into two halves: input gradients now, because other stages wait for them, weight gradients later.

Most of a backward's time is spent in two products per matrix y = x W', with W (outputs, inputs): dx = dy W and
dW = dy' x. Inside `defer_weight_grads`, only the first one is computed; the second one becomes a function to call later
(Qi et al. 2023, arXiv:2401.10241):

    with defer_weight_grads() as deferred:
        loss.backward()
    ...
    run_deferred(deferred)

Hand-written backwards call `compute_or_defer`: here, that of column-parallel layers.

Gradients that take little time are never deferred: those of norms, biases and embeddings, and that of the head, whose
product was part of forward (see `LinearCrossEntropy`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

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


def is_deferring() -> bool:
    return _deferred is not None


def compute_or_defer(
    edges: Sequence[GradientEdge | None], compute: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor | None]:
    """Compute the gradients of an autograd function's weights, or defer them. The function's backward returns the
    result: the gradients, or None for each that is deferred or not needed.

    Args:
        edges: edges of these weights, see `gradient_edges`.
        compute: function that returns the gradients of all these weights.
    """
    if not any(edges):
        return [None] * len(edges)
    if _deferred is None:
        return compute()

    def accumulate() -> None:
        # From an edge, backward continues as usual: a leaf accumulates its gradient and calls its hooks, and a tensor
        # that was computed from a leaf passes its gradient on.
        gradients = [gradient for edge, gradient in zip(edges, compute(), strict=True) if edge]
        torch.autograd.backward([edge for edge in edges if edge], gradients)

    _deferred.append(accumulate)
    return [None] * len(edges)
