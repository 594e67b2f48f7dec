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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype
from picotron.config import Distributed
from picotron.context_parallel.block_attention import accumulate_gradients, blockwise_attention
from picotron.context_parallel.cp_communications import ring, start_ring_step
from picotron.context_parallel.positions import BlocksOf, visible_blocks
from picotron.model.llama import AttentionFn, Llama

if TYPE_CHECKING:
    from picotron.model.packed import PackedDocuments


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


def apply_context_parallel(model: Llama, layout: Distributed) -> None:
    """Let a Llama whose input is a shard of the sequence attend to the full sequence."""
    if pgm.process_group_manager.cp_world_size > 1:
        # torch.compile cannot overlap the messages and does not know the kernels. The rest of a layer is compiled.
        model.attention_fn = torch.compiler.disable(attend_across_ranks(layout, model.attention_fn))
        model.cp_sharding = layout.cp_sharding


def attend_across_ranks(layout: Distributed, attention_fn: AttentionFn) -> AttentionFn:
    """Return the attention function for q, k and v that are shards of the sequence, (B, H, T/cp, d).

    Args:
        attention_fn: attention to a full sequence, which ulysses calls.
    """
    if layout.cp_engine == "ulysses":
        from picotron.context_parallel.ulysses import ulysses_attention

        return functools.partial(ulysses_attention, sharding=layout.cp_sharding, attention_fn=attention_fn)
    function: type[torch.autograd.Function] = RingAttention
    if layout.cp_engine == "all_gather":
        from picotron.context_parallel.all_gather import AllGatherAttention

        function = AllGatherAttention

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: "PackedDocuments | None" = None) -> Tensor:
        blocks_of = functools.partial(visible_blocks, sharding=layout.cp_sharding)
        if documents is not None:
            from picotron.context_parallel.packed import packed_blocks

            blocks_of = functools.partial(packed_blocks, sharding=layout.cp_sharding, documents=documents)
        return function.apply(q, k, v, blocks_of)

    return attend
