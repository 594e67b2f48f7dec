"""Log-probabilities of given tokens, for losses of your own."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from picotron.collectives import accumulation_dtype
from picotron.model.cross_entropy import IGNORE_INDEX, Softmax, VocabularyShard, add_product, chunk_tokens
from picotron.model.llama import Head


class LinearLogProbs(torch.autograd.Function):
    """forward: the log-probabilities (B T,) of the targets under softmax(x W'), x (B T, D) and W (V/tp, D).
    backward: the gradients of x and W. Both compute the logits, in chunks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.shard = shard
        step = chunk_tokens(x.device.type, len(weight))
        chunks = zip(x.split(step), targets.split(step), strict=True)
        return torch.cat([Softmax.of(chunk @ weight.t(), ids, shard).log_probs for chunk, ids in chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=accumulation_dtype(weight))
        step = chunk_tokens(x.device.type, len(weight))
        for start in range(0, len(x), step):
            chunk = slice(start, start + step)
            logits = x[chunk] @ weight.t()
            gradient = Softmax.of(logits, targets[chunk], ctx.shard).gradient(-dy[chunk], out=logits)
            torch.mm(gradient, weight, out=dx[chunk])
            add_product(dweight, gradient.t(), x[chunk])
            del logits, gradient
        return dx, dweight.to(weight.dtype), None, None


def log_probs(head: Head, x: Tensor, target_ids: Tensor) -> Tensor:
    """Compute the log-probabilities of target_ids (B, T/cp) given the head's input x: (B, T/cp) in float32 or wider.
    They are 0 for targets that are IGNORE_INDEX.
    """
    return linear_log_probs(head.enter(x), head.weight, target_ids, head.vocabulary)


def linear_log_probs(x: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
    """Compute `log_probs` from x (B, T, D) and a head's weight. Arguments: see `linear_cross_entropy`."""
    values = LinearLogProbs.apply(x.flatten(0, 1), weight, targets.flatten(), shard).view(targets.shape)
    return values.masked_fill(targets == IGNORE_INDEX, 0)
