"""Attention to one block of keys after the other, and the log-sum-exp of their scores, with which results are merged.

PyTorch's fused kernels return the log-sum-exp, and their backwards accept any output and log-sum-exp: given those of
the attention to all keys, they compute one block's contribution to the gradients. So the full matrix of scores is never
in memory.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from picotron.collectives import accumulation_dtype

aten = torch.ops.aten


class Block(NamedTuple):
    """Queries of this rank and the keys of a rank to which they attend, in some rows of the batch.

    Args:
        new_shape: whether blocks of other micro-batches have other shapes, for which cuDNN would plan anew.
    """

    queries: slice
    keys: slice
    causal: bool = False
    rows: slice = slice(None)
    new_shape: bool = False

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the block's part of x (B, H, T/cp, ...), a tensor with an entry for each query of this rank."""
        return x[self.rows, :, self.queries]

    def of_keys(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's keys and values from kv (2, B, K, T/cp, d), which has all keys and values of a rank."""
        return kv[0, self.rows, :, self.keys], kv[1, self.rows, :, self.keys]


BlocksOf = Callable[[int, int], list[Block]]
"""function of a cp rank and the number of tokens per rank, T/cp: `visible_blocks`, or `packed_blocks`"""


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether torch would choose cuDNN's kernel, as it does in half precision on Hopper GPUs.

    Its backward returned NaN for numbers of keys that leave a part of a tile of 128 (pytorch/pytorch#196678).
    """
    if not q.is_cuda or k.size(2) % 128:
        return False
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=q.size(1) != k.size(1))
    return choice == SDPBackend.CUDNN_ATTENTION.value


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool = False) -> tuple[Tensor, Tensor]:
    """Compute attention of the queries q to one block of keys k and values v.

    Args:
        q: (B, H, T, d).
        k, v: (B, K, S, d) for S keys, where H is a multiple of K.
        causal: whether query i attends to keys 0 to i only, which requires S = T, instead of to all keys.
        new_shape: whether other micro-batches have other T and S. cuDNN would then spend most of the time on building
            plans, one for each shape, which it never forgets.

    Returns:
        The output (B, H, T, d) in q's dtype, and the natural log-sum-exp of the scaled scores (B, H, T) in float32,
        or in float64 for float64 inputs.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if not new_shape and prefers_cudnn(q, k, v, causal):
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse.squeeze(-1)
    if q.dtype == torch.bfloat16:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    queries_per_kv = q.size(1) // k.size(1)  # this kernel needs a key/value head for each query head
    k, v = (x.repeat_interleave(queries_per_kv, dim=1) for x in (k, v))
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse[..., : q.size(2)]  # the kernel pads lse


def block_backward(
    dy: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one block's contribution to the gradients of q, k and v.

    Args:
        dy: gradient of the output of the attention to all keys, (B, H, T, d).
        q, k, v, causal, new_shape: those of the block, as in `block_forward`.
        out, lse: output and log-sum-exp of the attention to all keys.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, lse, 0.0, causal)
    lse = lse.contiguous()  # the kernels ignore its strides
    random_state = torch.zeros((), dtype=torch.int64, device=q.device)  # unused: there is no dropout
    if not new_shape and prefers_cudnn(q, k, v, causal):
        return aten._scaled_dot_product_cudnn_attention_backward(
            dy,
            q,
            k,
            v,
            out,
            lse[..., None],
            random_state,
            random_state,
            None,
            None,
            None,
            q.size(2),
            k.size(2),
            0.0,
            causal,
        )
    if q.dtype == torch.bfloat16:
        return aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, random_state, random_state
        )
    queries_per_kv = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(queries_per_kv, dim=1) for x in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32))
    needed = (True, True, True, False)
    dq, *repeated, _ = aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, None, out, padded, random_state, random_state, 0.0, needed, causal
    )
    dk, dv = (x.unflatten(1, (-1, queries_per_kv)).sum(2) for x in repeated)
    return dq, dk, dv


def merge_attention(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the attention to one more block of keys and values into `out` and `lse`, in place.

    Attention is a weighted mean of values with total weight exp(lse). Two results are merged by averaging them with
    these weights, and by adding the weights.

    Args:
        out: (B, H, T/cp, d) in float32 or wider; starts at 0.
        lse: (B, H, T/cp) in float32 or wider; starts at -inf, a weight of 0.
        block_out, block_lse: output of the block, and log-sum-exp of its scores.
    """
    new_lse = torch.logaddexp(lse, block_lse)
    out.mul_((lse - new_lse).exp_()[..., None]).add_((block_lse - new_lse).exp_()[..., None] * block_out)
    lse.copy_(new_lse)


def blockwise_attention(q: Tensor, shards: Iterable[tuple[int, Tensor]], blocks_of: BlocksOf) -> tuple[Tensor, Tensor]:
    """Compute attention of q (B, H, T/cp, d) to the keys and values of all ranks.

    Args:
        shards: (cp rank, its keys and values (2, B, K, T/cp, d)) for all ranks, in any order.
        blocks_of: see `BlocksOf`.

    Returns:
        The output (B, H, T/cp, d) in q's dtype, and the log-sum-exp (B, H, T/cp) in float32 or wider.
    """
    wide = accumulation_dtype(q)
    out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for source, kv in shards:
        for block in blocks_of(source, q.size(2)):
            part = block_forward(block.of_queries(q), *block.of_keys(kv), block.causal, block.new_shape)
            merge_attention(block.of_queries(out), block.of_queries(lse), *part)
            del part
        del kv  # frees its memory before the next shard is allocated
    return out.to(q.dtype), lse


def accumulate_gradients(
    dy: Tensor, q: Tensor, kv: Tensor, blocks: list[Block], out: Tensor, lse: Tensor, dq: Tensor, dkv: Tensor
) -> None:
    """Add the contribution of blocks to dq (B, H, T/cp, d) and dkv (2, B, K, T/cp, d), in place.

    Args:
        dy, out, lse: gradient, output and log-sum-exp of the attention to all keys.
    """
    for block in blocks:
        block_dy, block_q, block_out, block_lse = (block.of_queries(each) for each in (dy, q, out, lse))
        k, v = block.of_keys(kv)
        block_dq, dk, dv = block_backward(block_dy, block_q, block_out, block_lse, k, v, block.causal, block.new_shape)
        block.of_queries(dq).add_(block_dq)
        for total, part in zip(block.of_keys(dkv), (dk, dv), strict=True):
            total.add_(part)
