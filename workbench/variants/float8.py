"""Matrix products in float8 (Micikevicius et al. 2022, arXiv:2209.05433), of which a GPU computes twice as many per
second as in bfloat16.

Weights, activations and gradients stay in the model's dtype. For a product, each operand is divided by a scale, so that
its largest element becomes the largest number of the format, and rounded. So there is no state between products.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from picotron.console import UserError
from picotron.model.llama import MLP, Llama
from picotron.tensor_parallel.tensor_parallel import ParallelProjections
from picotron.tensor_parallel.tp_communications import enter

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
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return float8_product(x.flatten(0, -2), weight, E4M3, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), (needs_dx, needs_dweight) = ctx.saved_tensors, ctx.needs_input_grad
        dy = dy.flatten(0, -2)
        dx = float8_product(dy, weight.t(), E5M2).view_as(x) if needs_dx else None
        return dx, float8_product(dy.t(), x.flatten(0, -2).t(), E5M2) if needs_dweight else None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` in float8."""
    y = Float8Linear.apply(x, weight)
    return y if bias is None else y + bias


class CalledProjections(ParallelProjections):
    """`ParallelProjections` that calls its layers, whose products are not those of `ColumnParallel`."""

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        x = enter(x, self.group, self.sequence_parallel)
        return [linear(x) for linear in linears]


def use_float8(model: Llama) -> None:
    """Let the MLPs and `o_proj` of a Llama compute in float8. The projections to q, k and v do not: errors of scores
    grow in their exponentials.

    Raises:
        UserError: the GPU has no float8.
    """
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"model.float8=true needs a GPU with float8, such as an H100, not {torch.cuda.get_device_name(device)}; set it "
            f"to false"
        )
    layers: Any = model.model.layers.values()
    for layer in layers:
        layer.self_attn.o_proj.product = float8_linear
        if not isinstance(
            layer.mlp, MLP
        ):  # experts stay in the model's dtype: their numbers of rows are no multiples of 16
            continue
        if isinstance(layer.mlp.project, ParallelProjections):
            layer.mlp.project = CalledProjections(layer.mlp.project.sequence_parallel)
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.product = float8_linear
