"""Cross entropy without all logits in memory: they are computed for a few tokens at a time, and on each tp rank for its
shard of the vocabulary only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from picotron.collectives import accumulation_dtype, all_reduce

IGNORE_INDEX = -100  # target that does not count, as in torch.nn.functional.cross_entropy
CHUNK_TOKENS = 512  # number of tokens whose logits are in memory at the same time, on a CPU
CHUNK_LOGITS = 2**28  # number of logits in memory at the same time, on a GPU, which needs large products to be fast
TILE = 256  # tokens by which a GPU divides a product: a chunk that is no multiple of it leaves a part of the GPU idle


def chunk_tokens(device_type: str, vocabulary: int) -> int:
    """Return the number of tokens whose logits are in memory at the same time.

    Args:
        vocabulary: number of logits of a token on this rank.
    """
    return CHUNK_TOKENS if device_type == "cpu" else max(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary // TILE * TILE)


class VocabularyShard(NamedTuple):
    """The rows of the head's weight that a rank holds: without tensor parallelism, all."""

    start: int  # token of the first row
    rows: int  # number of rows that are tokens; the others, at the end, are padding
    group: dist.ProcessGroup | None = None  # the ranks that hold the others; None: there are none


class Softmax(NamedTuple):
    """Softmax of the logits of C tokens, of which each rank has those of its shard of the vocabulary.

    The ranks exchange three numbers per token (the largest logit, the sum of the exponentials, the target's logit), as
    in section 3 of Shoeybi et al. 2019 (arXiv:1909.08053), and never gather the logits.
    """

    exponentials: Tensor  # of the logits minus the token's largest one, (C, V/tp), in float32 or wider
    sums: Tensor  # of the exponentials over the whole vocabulary, (C,)
    log_probs: Tensor  # of the targets, (C,)
    column: Tensor  # of the target in this shard, (C,); 0 if it is on another rank
    is_local: Tensor  # whether the target is in this shard, (C,)

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, shard: VocabularyShard) -> "Softmax":
        """Compute the softmax of logits (C, V/tp). In float32 or wider, all of them are overwritten."""
        wide = accumulation_dtype(logits)
        logits[:, shard.rows :] = -torch.inf  # padding rows get probability 0
        column = targets - shard.start
        is_local = (column >= 0) & (column < shard.rows)
        column = column.where(is_local, 0)
        top = logits.amax(-1).to(wide)
        if shard.group is not None:
            all_reduce(top, shard.group, dist.ReduceOp.MAX)
        target_logit = (logits.gather(1, column[:, None])[:, 0] - top).where(is_local, 0)  # 0 on all other ranks
        # A new buffer only if the logits are in bfloat16.
        exponentials = torch.sub(logits, top[:, None], out=logits if logits.dtype == wide else None).exp_()
        sums = torch.stack((exponentials.sum(-1), target_logit))
        if shard.group is not None:
            all_reduce(sums, shard.group)
        return cls(exponentials, sums[0], sums[1] - sums[0].log(), column, is_local)

    def gradient(self, scale: Tensor, out: Tensor) -> Tensor:
        """Compute the logits' gradient of -sum(scale * log_probs), (softmax - onehot) * scale, into `out` (C, V/tp).
        The exponentials are overwritten if `out` is their memory.
        """
        factor, rows = scale / self.sums, torch.arange(len(out), device=out.device)
        # The targets' elements are written last, so that torch.compile need not store the exponentials.
        targets = (self.exponentials[rows, self.column] - self.sums * self.is_local) * factor
        torch.mul(self.exponentials, factor[:, None], out=out)
        out[rows, self.column] = targets.to(out.dtype)
        return out


def chunk_loss(
    logits: Tensor, targets: Tensor, target_weights: Tensor, shard: VocabularyShard, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the weighted sum of the cross entropies of logits (C, V/tp), which are overwritten, and its gradient."""
    softmax = Softmax.of(logits, targets, shard)
    loss = -(softmax.log_probs * target_weights).sum()
    # Compiled code has no exponentials in memory, but would write the gradient elsewhere and copy it into the logits.
    out = torch.empty_like(logits) if torch.compiler.is_compiling() else logits
    return loss, softmax.gradient(target_weights, out) if with_gradient else None


ChunkLoss = Callable[[Tensor, Tensor, Tensor, VocabularyShard, bool], tuple[Tensor, Tensor | None]]


class LinearCrossEntropy(torch.autograd.Function):
    """forward: the weighted sum of the cross entropies of softmax(x W'), x (B T, D) and W (V/tp, D), and the gradients
    of x and W. backward: scale these gradients.

    Forward processes the tokens in chunks and computes each chunk's gradients while its logits are in memory. This is
    possible because the loss is a scalar, so that backward only has to scale them. Instead of the logits, softmax and
    gradient of all B T tokens (3 B T V/tp numbers in float32), memory holds those of one chunk, see `chunk_tokens`,
    and the gradients of x and W, which a backward that follows immediately would allocate anyway. For B T = 8,192,
    V = 49,152 and tp = 1, the logits, softmax and gradient take at most 0.3 GB on a CPU instead of 4.8 GB.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        target_weights: Tensor,
        shard: VocabularyShard,
        compute_chunk: ChunkLoss,
        with_gradients: bool,
    ) -> Tensor:
        wide = accumulation_dtype(x)
        loss, dx = torch.zeros((), dtype=wide, device=x.device), torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=wide) if with_gradients and weight.requires_grad else None
        step = chunk_tokens(x.device.type, len(weight))
        for start in range(0, len(x), step):
            chunk = slice(start, start + step)
            logits = x[chunk] @ weight.t()  # (C, V/tp), with C tokens in the chunk
            part, gradient = compute_chunk(logits, targets[chunk], target_weights[chunk], shard, with_gradients)
            loss += part
            if gradient is not None:
                torch.mm(gradient, weight, out=dx[chunk])
                if dweight is not None:
                    add_product(dweight, gradient.t(), x[chunk])
            del logits, gradient  # frees their memory before the next chunk's are allocated
        ctx.gradients, ctx.dtype = (dx, dweight), weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "a second backward: the first one has scaled the gradients in place"
        (dx, dweight), ctx.gradients = ctx.gradients, None
        # Multiply in the dtype of `gradient`, float32 or wider: a factor of 1/3 rounded to bfloat16 would shift all
        # gradients by 0.2 %.
        dweight = None if dweight is None else dweight.mul_(gradient).to(ctx.dtype)
        return dx.mul_(gradient[None]), dweight, *[None] * 5


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which may have a wider dtype than a and b: in one operation if the device has one."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    target_weights: Tensor | None = None,
    compute_chunk: ChunkLoss = chunk_loss,
) -> Tensor:
    """Compute the sum of the tokens' cross entropies times `target_weights`, or without weights their mean. Targets
    that are IGNORE_INDEX count in neither. A scalar in float32 or wider.

    Args:
        x: (B, T, D), full; its gradient is partial.
        weight: (V/tp, D), this rank's shard of the vocabulary.
        targets, target_weights: (B, T). A target whose weight is 0 can be any number. Others are IGNORE_INDEX or
            tokens, which is not checked here.
        compute_chunk: `chunk_loss`, or the same compiled.
    """
    wide = accumulation_dtype(x)
    counted = (targets != IGNORE_INDEX).to(wide)
    target_weights = counted / counted.sum() if target_weights is None else counted * target_weights
    flat = x.flatten(0, 1), weight, targets.flatten(), target_weights.to(wide).flatten()
    return LinearCrossEntropy.apply(*flat, shard, compute_chunk, torch.is_grad_enabled())
