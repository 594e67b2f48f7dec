"""Context parallelism that gathers all keys and values, as in Llama 3 (arXiv:2407.21783, section 3.3.2)."""

from typing import Any

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_gather_single, reduce_scatter_single
from picotron.context_parallel.block_attention import BlocksOf, accumulate_gradients, blockwise_attention


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
