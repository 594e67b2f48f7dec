"""Cross entropy of a vocabulary-parallel head: each rank computes the logits of its shard of the vocabulary only."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from picotron.collectives import accumulation_dtype, all_reduce

CHUNK_TOKENS = 512  # number of tokens whose logits are in memory at the same time, on a CPU
CHUNK_LOGITS = 2**28  # number of logits in memory at the same time, on a GPU, which needs large products to be fast


def chunk_tokens(device_type: str, vocabulary: int) -> int:
    """Return the number of tokens whose logits are in memory at the same time.

    Args:
        vocabulary: number of logits of a token on this rank.
    """
    return CHUNK_TOKENS if device_type == "cpu" else max(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary)


class LinearCrossEntropy(torch.autograd.Function):
    """forward: the mean cross entropy of softmax(x W'), x (B T, D) and W (V/tp, D), and the gradients of x and W.
    backward: scale these gradients.

    W is sharded over tp by rows, one per token of the vocabulary. The ranks exchange three numbers per token of x (the
    largest logit, the sum of the exponentials, the target's logit), as in section 3 of Shoeybi et al. 2019
    (arXiv:1909.08053), and never gather the logits.

    Forward processes the tokens in chunks and computes each chunk's gradients while its logits are in memory. This is
    possible because the loss is a scalar, so that backward only has to scale them. Instead of the logits, softmax and
    gradient of all B T tokens (3 B T V/tp numbers in float32), memory holds those of one chunk (at most 3 * 512 V/tp)
    and the gradients of x and W, which a backward that follows immediately would allocate anyway. For B T = 8,192,
    V = 49,152 and tp = 1, the logits, softmax and gradient take at most 0.3 GB on a CPU instead of 4.8 GB.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_start: int,
        vocab_rows: int,
        group: dist.ProcessGroup,
        ignore_index: int,
        with_gradients: bool,
    ) -> Tensor:
        wide = accumulation_dtype(x)
        kept = targets != ignore_index
        count = kept.sum()
        loss = torch.zeros((), dtype=wide, device=x.device)
        dx = torch.empty_like(x) if with_gradients else None
        dweight = torch.zeros_like(weight, dtype=wide) if with_gradients else None
        step = chunk_tokens(x.device.type, len(weight))
        for start in range(0, len(x), step):
            chunk = slice(start, start + step)
            logits = x[chunk] @ weight.t()  # (C, V/tp), with C tokens in the chunk
            logits[:, vocab_rows:] = -torch.inf  # padding rows get probability 0
            target = targets[chunk] - vocab_start  # (C,), as rows of this rank's shard
            is_local = (target >= 0) & (target < vocab_rows) & kept[chunk]
            target = target.where(is_local, 0)

            top = logits.amax(-1).to(wide)
            all_reduce(top, group, dist.ReduceOp.MAX)
            target_logit = logits.gather(1, target[:, None])[:, 0] - top
            target_logit = target_logit.where(is_local, 0)  # partial: 0 on all other ranks
            # In float32 or wider; a new buffer only if the logits are in bfloat16.
            exponentials = torch.sub(logits, top[:, None], out=logits if logits.dtype == wide else None).exp_()
            sums = torch.stack((exponentials.sum(-1), target_logit))
            all_reduce(sums, group)
            loss += (sums[0].log() - sums[1]).where(kept[chunk], 0).sum()

            if dx is not None and dweight is not None:
                # d loss / d logits = (softmax - onehot) / count = (exponentials - onehot * sum) / (sum * count)
                exponentials.scatter_add_(1, target[:, None], -(sums[0] * is_local)[:, None])
                scale = kept[chunk] / (sums[0] * count)
                gradient = torch.mul(exponentials, scale[:, None], out=logits)
                torch.mm(gradient, weight, out=dx[chunk])
                add_product(dweight, gradient.t(), x[chunk])
                del gradient
            del logits, exponentials  # frees their memory before the next chunk's are allocated
        ctx.gradients = dx, dweight
        ctx.dtype = weight.dtype
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "a second backward: the first one has scaled the gradients in place"
        (dx, dweight), ctx.gradients = ctx.gradients, None
        # Multiply in the dtype of `gradient`, float32 or wider: a factor of 1/3 rounded to bfloat16 would shift all
        # gradients by 0.2 %.
        return dx.mul_(gradient[None]), dweight.mul_(gradient).to(ctx.dtype), *[None] * 6


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
    vocab_start: int,
    vocab_rows: int,
    group: dist.ProcessGroup,
    ignore_index: int = -100,
) -> Tensor:
    """Compute the mean cross entropy over the tokens whose target is not `ignore_index`, in float32 or wider.

    Args:
        x: (B, T, D), full; its gradient is partial.
        weight: (V/tp, D), this rank's shard of the vocabulary.
        targets: (B, T).
        vocab_start: token of the first row of `weight`.
        vocab_rows: number of rows of `weight` that are tokens; the others, at the end, are padding.
        group: the tp ranks.
    """
    x, targets = x.flatten(0, 1), targets.flatten()
    arguments = (vocab_start, vocab_rows, group, ignore_index, torch.is_grad_enabled())
    return LinearCrossEntropy.apply(x, weight, targets, *arguments)
