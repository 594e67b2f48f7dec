"""The linear layer of the model, and the matrix products of which it consists."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Products:
    """The matrix products of linear layers that share their input x (..., inputs), with weights W (outputs, inputs).

    Layers have them as an attribute: float8 replaces all of them, and a schedule that splits backward replaces the
    first.
    """

    linear = staticmethod(F.linear)
    """y = x W' + b, with its gradients"""

    @staticmethod
    def dx(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Compute the gradient of x, the sum of dy W over all layers, from matrices dy (tokens, outputs)."""
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        return dx

    @staticmethod
    def dweight(dy: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of a weight, dy' x, from matrices dy (tokens, outputs) and x (tokens, inputs)."""
        return dy.t() @ x


class Linear(nn.Linear):
    """`torch.nn.Linear` with replaceable `products`."""

    products: Any = Products

    def forward(self, x: Tensor) -> Tensor:
        return self.products.linear(x, self.weight, self.bias)

    def together(self, x: Tensor, *others: nn.Module) -> list[Tensor]:
        """Apply this layer and others to the same x: one after the other. (Column-parallel layers share messages.)"""
        return [linear(x) for linear in (self, *others)]
