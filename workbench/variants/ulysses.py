"""Ulysses (Jacobs et al. 2023, arXiv:2309.14509): context parallelism that shards the heads during attention."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.context_parallel.context_parallel import local_positions
from picotron.model.llama import AttentionFn
from workbench.variants.packed import PackedDocuments

HEADS, SEQUENCE = 1, 2  # dimensions of q, k and v, (B, H, T, d)


class AllToAll(torch.autograd.Function):
    """forward: cut x along dimension `split` into a shard for each rank, and join the received shards along `join`.
    backward: the same with `split` and `join` swapped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        grid = pgm.process_group_manager
        ctx.split, ctx.join = split, join
        shards = x.unflatten(split, (grid.cp_world_size, -1)).movedim(split, 0).contiguous()  # (cp, ...)
        received = torch.empty_like(shards)
        dist.all_to_all_single(received, shards, group=grid.cp_group)
        return received.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return AllToAll.apply(dy, ctx.join, ctx.split), None, None


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedDocuments | None = None,
    *,
    sharding: str,
    attention_fn: AttentionFn,
) -> Tensor:
    """Compute attention with all-to-alls around it: (B, H, T/cp, d) -> (B, H/cp, T, d), `attention_fn`, and back."""
    size = pgm.process_group_manager.cp_world_size
    positions, order = sequence_order(q.size(SEQUENCE) * size, size, sharding, q.device)
    # After the all-to-all, tokens are sorted by rank; causal attention needs them in the order of the sequence.
    q, k, v = (AllToAll.apply(x, HEADS, SEQUENCE).index_select(SEQUENCE, order) for x in (q, k, v))
    return AllToAll.apply(attention_fn(q, k, v, documents).index_select(SEQUENCE, positions), SEQUENCE, HEADS)


@functools.lru_cache(maxsize=16)  # packed micro-batches have many lengths
def sequence_order(length: int, size: int, sharding: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of all tokens, rank after rank, and the inverse of this permutation."""
    positions = torch.cat([local_positions(length, size, rank, sharding) for rank in range(size)]).to(device)
    return positions, positions.argsort()
