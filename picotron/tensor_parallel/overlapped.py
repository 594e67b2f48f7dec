"""The beginning of a tensor-parallel block, faster: messages and products overlap, and with sequence parallelism, only
the shard of x is kept for backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron.tensor_parallel.tensor_parallel import ParallelProjections
from picotron.tensor_parallel.tp_communications import start_all_gather, start_sum


def gradient_of_input(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Compute the sum of dy W over linear layers that share their input, from matrices dy (tokens, outputs)."""
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(dy, weight)
    return dx


class ColumnParallel(torch.autograd.Function):
    """forward: y = x W' for several W (outputs/tp, D) that share x, so that x is gathered only once.
    backward: dx = dy W, summed over these W and over the ranks, and meanwhile dW = dy' x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, *weights)  # x may be a shard, (B, T/tp, D): backward gathers it again
        full_x = start_all_gather(x, group)() if sequence_parallel else x  # (B, T, D)
        return tuple(F.linear(full_x, weight) for weight in weights)  # (B, T, outputs/tp) each

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        trained = ctx.needs_input_grad[3:]  # False for frozen weights
        finish_x = start_all_gather(x, ctx.group) if ctx.sequence_parallel and any(trained) else lambda: x
        dys = [gradient.flatten(0, 1) for gradient in gradients]  # (B * T, outputs/tp)
        dx = gradient_of_input(dys, weights).view(*gradients[0].shape[:2], -1)  # (B, T, D), partial
        finish_dx = start_sum(dx, ctx.group, ctx.sequence_parallel)
        inputs = finish_x().flatten(0, 1)  # (B * T, D); the sum of dx is on its way
        dweights = [dy.t() @ inputs if needed else None for dy, needed in zip(dys, trained, strict=True)]
        return finish_dx(), None, None, *dweights


class OverlappedProjections(ParallelProjections):
    """`ParallelProjections` of `ColumnParallel`."""

    function: Any = ColumnParallel  # of a schedule that defers weight gradients, another one

    @torch.compiler.disable  # torch.compile cannot overlap these collectives, and products gain nothing from it
    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        ys = self.function.apply(x, self.group, self.sequence_parallel, *(linear.weight for linear in linears))
        return [y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears, strict=True)]
