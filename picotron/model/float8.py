"""Matrix products in float8 (Micikevicius et al. 2022, arXiv:2209.05433), of which a GPU computes twice as many per
second as in bfloat16.

Weights, activations and gradients stay in the model's dtype. For a product, each operand is divided by a scale, so that
its largest element becomes the largest number of the format, and rounded. So there is no state between products.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

E4M3 = torch.float8_e4m3fn  # 3 bits of mantissa, up to 448: weights and activations
E5M2 = torch.float8_e5m2  # 2 bits of mantissa, up to 57,344: gradients, whose elements differ more in size


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in a float8 dtype, and the scale, a scalar."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max  # clamped, because x can be 0
    return (x / scale).to(dtype), scale


def float8_product(a: Tensor, b: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Compute a b' in the dtype of a, with a (m, k) rounded to `dtype`, b (n, k) to E4M3; n is a multiple of 16.

    Args:
        fast: whether to accumulate the sum with fewer bits.
    """
    (a8, a_scale), (b8, b_scale) = quantise(a, dtype), quantise(b, E4M3)
    if a.device.type == "cpu":  # where torch's kernel for two matrices in E4M3 can be 700 times slower than float32
        return (a8.float() @ b8.t().float() * (a_scale * b_scale)).to(a.dtype)
    # The kernel reads both operands along k, 16 elements at a time.
    a8, b8 = (F.pad(each, (0, -a.size(1) % 16)).contiguous() for each in (a8, b8))
    return torch._scaled_mm(a8, b8.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=a.dtype, use_fast_accum=fast)


class Float8Linear(torch.autograd.Function):
    """forward: y = x W'. backward: dx = dy W and dW = dy' x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: "Float8Products") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.product(x.flatten(0, -2), weight, E4M3, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), (needs_dx, needs_dweight, _) = ctx.saved_tensors, ctx.needs_input_grad
        dy = dy.flatten(0, -2)
        dx = ctx.products.dx([dy], [weight]).view_as(x) if needs_dx else None
        return dx, ctx.products.dweight(dy, x.flatten(0, -2)) if needs_dweight else None, None


class Float8Products:
    """`linear.Products` in float8.

    Args:
        product: `float8_product`, or the same compiled.
    """

    def __init__(self, product: Any = float8_product) -> None:
        self.product = product

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = Float8Linear.apply(x, weight, self)
        return y if bias is None else y + bias

    def dx(self, dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        parts = [self.product(dy, weight.t(), E5M2) for dy, weight in zip(dys, weights, strict=True)]
        return sum(parts[1:], start=parts[0])

    def dweight(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.product(dy.t(), x.t(), E5M2)


def use_float8(layer: Any, products: Float8Products) -> None:
    """Let the MLP and `o_proj` of a decoder layer compute in float8. The projections to q, k and v do not: errors of
    scores grow in their exponentials.
    """
    for linear in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
        linear.products = products
