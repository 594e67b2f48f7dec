"""Context parallelism: each rank holds T/cp tokens of every sequence, and only attention needs other ranks' tokens.

In causal attention, a token attends to the keys and values of itself and of all tokens before it. Three engines
provide them:

    ring         keys and values travel from rank to rank; each rank attends to the shard that it has while the next
                 one is on its way (Liu et al. 2023, arXiv:2310.01889)
    all_gather   every rank gathers all keys and values, then attends to them, as in Llama 3 (arXiv:2407.21783, section
                 3.3.2)
    ulysses      an all-to-all turns a shard of the sequence with all heads, (B, H, T/cp, d), into the full sequence
                 with a shard of the heads, (B, H/cp, T, d), and back after attention (Jacobs et al. 2023,
                 arXiv:2309.14509)

The sharding decides how evenly the work is divided. If each rank holds consecutive tokens ("contiguous"), the first
rank attends to its own shard only and the last rank to all shards: the last one has 2 cp - 1 times as much work, and
all others wait for it. If the sequence is cut into 2 cp chunks and rank r holds chunks r and 2 cp - 1 - r ("zigzag"),
all ranks have the same work. For cp = 2, with the rank of each chunk of queries on the left, and an x for each chunk of
keys that these queries attend to:

    contiguous  0 | x                 zigzag  0 | x
                0 | x x                       1 | x x
                1 | x x x                     1 | x x x
                1 | x x x x                   0 | x x x x

In the shapes below, H and K count the heads of a tp rank.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_gather_single, reduce_scatter_single
from picotron.config import Distributed
from picotron.console import UserError
from picotron.context_parallel.block_attention import block_backward, block_forward
from picotron.context_parallel.cp_communications import ring, start_ring_step
from picotron.context_parallel.positions import BlocksOf, PackedBlock, packed_blocks
from picotron.context_parallel.ulysses import ulysses_attention
from picotron.model.attention import PackedDocuments
from picotron.model.families import head_size
from picotron.model.llama import Attention, AttentionFn


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
        blocks_of: see `packed_blocks`.

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
    dy: Tensor, q: Tensor, kv: Tensor, blocks: list[PackedBlock], out: Tensor, lse: Tensor, dq: Tensor, dkv: Tensor
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


class RingAttention(torch.autograd.Function):
    """forward: queries stay; each shard of keys and values travels around the ring, and every rank attends to it.
    backward: each shard travels around once more, followed by its gradient, to which every rank adds its contribution.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks_of: BlocksOf) -> Tensor:
        out, lse = blockwise_attention(q, ring(torch.stack((k, v))), blocks_of)
        ctx.blocks_of = blocks_of
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q))
        # A shard's gradient follows it one step behind: this rank adds its contribution to the sum over the ranks that
        # the shard has visited before, and sends the new sum on. The last rank sends the sum to the shard's owner.
        receive_sum: Callable[[], Tensor] = functools.partial(dq.new_zeros, ())  # 0 before any rank was visited
        for source, kv in ring(torch.stack((k, v))):
            dkv = torch.zeros_like(kv, dtype=accumulation_dtype(kv))
            accumulate_gradients(dy, q, kv, ctx.blocks_of(source, q.size(2)), out, lse, dq, dkv)
            dkv += receive_sum()
            receive_sum = start_ring_step(dkv)  # the last shard in the ring is the next rank's own
            del kv
        dk, dv = receive_sum()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class AllGatherAttention(torch.autograd.Function):
    """forward: all-gather of keys and values, then attention to each rank's shard of them.
    backward: all-gather again; reduce-scatter of the gradients, which each rank has for all keys and values.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks_of: BlocksOf) -> Tensor:
        out, lse = blockwise_attention(q, enumerate(gather_shards(torch.stack((k, v)))), blocks_of)
        ctx.blocks_of = blocks_of
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        all_kv = gather_shards(torch.stack((k, v)))  # (cp, 2, B, K, T/cp, d)
        dq, dkv = (torch.zeros_like(x, dtype=accumulation_dtype(x)) for x in (q, all_kv))
        for source, kv in enumerate(all_kv):
            accumulate_gradients(dy, q, kv, ctx.blocks_of(source, q.size(2)), out, lse, dq, dkv[source])
        own_dkv = torch.empty_like(dkv[0])  # (2, B, K, T/cp, d)
        reduce_scatter_single(own_dkv, dkv.flatten(0, 1), group=pgm.process_group_manager.cp_group)
        dk, dv = own_dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def gather_shards(x: Tensor) -> Tensor:
    """Gather the x of every cp rank: (...) -> (cp, ...)."""
    grid = pgm.process_group_manager
    gathered = x.new_empty(grid.cp_world_size, *x.shape)
    all_gather_single(gathered.flatten(0, 1), x, group=grid.cp_group)
    return gathered


def check_context_parallel(config: PreTrainedConfig, layout: Distributed) -> None:
    """Raise UserError if `cp_engine` cannot run this model."""
    kv_heads = max(1, config.num_key_value_heads // layout.tp_size)  # per tp rank
    if layout.cp_engine == "ulysses" and kv_heads % layout.cp_size:
        raise UserError(
            f"cp_engine='ulysses' cannot split the {kv_heads} key/value heads of a tp rank (num_key_value_heads / tp_size) over "
            f"cp_size={layout.cp_size} ranks; use a cp_size that divides {kv_heads}, or cp_engine 'ring'"
        )
    uses_blocks = layout.cp_size > 1 and layout.cp_engine != "ulysses"
    if uses_blocks and not layout.use_cpu and (head_size(config) % 8 or head_size(config) > 256):
        raise UserError(
            f"cp_engine={layout.cp_engine!r} on GPUs needs a head_dim that is a multiple of 8 and at most 256, not "
            f"{head_size(config)}; use cp_engine 'ulysses' or use_cpu=true"
        )


def apply_context_parallel(model: nn.Module, layout: Distributed) -> None:
    """Let the attention layers of `model`, whose input is a shard of the sequence, attend to the full sequence."""
    if pgm.process_group_manager.cp_world_size == 1:
        return
    for module in model.modules():
        if isinstance(module, Attention):
            # torch.compile cannot overlap the messages and does not know the kernels. The rest of a layer is compiled.
            module.attention_fn = torch.compiler.disable(attend_across_ranks(layout, module.attention_fn))
            module.cp_sharding = layout.cp_sharding  # type: ignore[assignment]  # of batches that programs split


def attend_across_ranks(layout: Distributed, attention_fn: AttentionFn) -> AttentionFn:
    """Return the attention function for q, k and v that are shards of the sequence, (B, H, T/cp, d).

    Args:
        attention_fn: attention to a full sequence, which ulysses calls.
    """
    if layout.cp_engine == "ulysses":
        return functools.partial(ulysses_attention, sharding=layout.cp_sharding, attention_fn=attention_fn)
    function = {"ring": RingAttention, "all_gather": AllGatherAttention}[layout.cp_engine]

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        blocks_of = functools.partial(packed_blocks, sharding=layout.cp_sharding, documents=documents)
        return function.apply(q, k, v, blocks_of)

    return attend
