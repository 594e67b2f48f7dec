"""Context parallelism: every rank holds a part of each sequence, and only attention has to see the rest.

Causal attention of a token needs the keys and values of all tokens before it. Three ways to get at them:

    ring         they travel from rank to rank; each attends to what it has, while the next part is on its way
                 (Liu et al. 2023, arXiv:2310.01889)
    all_gather   every rank gets all of them at once, as in Llama 3 (arXiv:2407.21783, section 3.3.2)
    ulysses      an all-to-all turns a part of the sequence with all heads into the whole sequence with a part of the
                 heads, and back after attention (Jacobs et al. 2023, arXiv:2309.14509)

Which part of the sequence? In its order ("contiguous"), the first rank attends to its own part and the last one to all
parts: it has 2 cp - 1 times as much to do, and everyone waits for it. Cut into 2 cp chunks, of which rank r has numbers
r and 2 cp - 1 - r ("zigzag"), all have the same work. For cp 2, with the rank that has these queries on the left:

    contiguous  0 | x                 zigzag  0 | x
                0 | x x                       1 | x x
                1 | x x x                     1 | x x x
                1 | x x x x                   0 | x x x x
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_gather_single, reduce_scatter_single
from picotron.config import Distributed
from picotron.context_parallel.block_attention import block_backward, block_forward
from picotron.context_parallel.cp_communications import ring, start_ring_step
from picotron.context_parallel.positions import local_positions
from picotron.errors import UserError
from picotron.model import Attention, AttentionFn

Block = tuple[slice, slice, bool]
ALL = slice(None)


def visible_blocks(source: int, tokens: int, sharding: str) -> list[Block]:
    """Which of this rank's queries see which of the keys of rank `source`: (queries, keys, causal), local indices.

    Args:
        tokens: how many a rank has.
    """
    rank = pgm.process_group_manager.cp_rank
    if source == rank:
        return [(ALL, ALL, True)]  # local tokens are in order, whatever lies between them elsewhere
    if sharding == "contiguous":
        return [(ALL, ALL, False)] if source < rank else []
    # Zigzag: both of our chunks come after the first chunk of an earlier rank, and before its second one; of a later
    # rank, both chunks lie between our two.
    half = tokens // 2
    return [(ALL, slice(half), False)] if source < rank else [(slice(half, None), ALL, False)]


def accumulate_attention(q: Tensor, kv: Tensor, blocks: list[Block], out: Tensor, lse: Tensor) -> None:
    """Add blocks of keys and values to the attention so far, in place.

    An attention is a mean, and exp(lse) its total weight; so two are joined by adding weights, and averaging by them.

    Args:
        q: (B, H, T, d). kv: (2, B, K, S, d), keys and values.
        out, lse: (B, H, T, d) and (B, H, T) in float32 or wider; of nothing: zeros and -inf.
    """
    for queries, keys, causal in blocks:
        k, v = kv[:, :, :, keys]
        y, s = block_forward(q[:, :, queries], k, v, causal)
        before = lse[:, :, queries]
        total = torch.logaddexp(before, s)
        mean = out[:, :, queries]
        mean.mul_((before - total).exp_()[..., None]).add_((s - total).exp_()[..., None] * y)
        before.copy_(total)


def accumulate_gradients(
    dy: Tensor, q: Tensor, kv: Tensor, blocks: list[Block], out: Tensor, lse: Tensor, dq: Tensor, dkv: Tensor
) -> None:
    """Add to dq and dkv, in place, what those blocks contribute; out and lse are of the attention to everything."""
    for queries, keys, causal in blocks:
        block_dy, block_q, block_out, block_lse = (each[:, :, queries] for each in (dy, q, out, lse))
        k, v = kv[:, :, :, keys]
        block_dq, dk, dv = block_backward(block_dy, block_q, block_out, block_lse, k, v, causal)
        dq[:, :, queries] += block_dq
        dkv[:, :, :, keys] += torch.stack((dk, dv))


def blockwise_attention(q: Tensor, parts: Iterable[tuple[int, Tensor]], sharding: str) -> tuple[Tensor, Tensor]:
    """Attention of q to the keys and values of all ranks, given as (rank, kv).

    Returns:
        The output (B, H, T, d) in q's dtype, and the log-sum-exp (B, H, T) in float32 or wider.
    """
    out, lse = (
        torch.zeros_like(q, dtype=accumulation_dtype(q)),
        q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q)),
    )
    for source, kv in parts:
        accumulate_attention(q, kv, visible_blocks(source, q.size(2), sharding), out, lse)
        del kv  # its memory is free before the next part needs some
    return out.to(q.dtype), lse


class RingAttention(torch.autograd.Function):
    """Keys and values travel the ring; in backward once more, and with each part its gradient, which every rank adds
    to as it passes.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sharding: str) -> Tensor:
        out, lse = blockwise_attention(q, ring(torch.stack((k, v))), sharding)
        ctx.sharding = sharding
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q))
        # The gradient of a part follows it one step behind: this rank adds its own to what the ranks before it have
        # collected, and sends that on. The last rank that a part visits is the one before its own.
        collected: Callable[[], Tensor] = functools.partial(dq.new_zeros, ())
        for source, kv in ring(torch.stack((k, v))):
            dkv = torch.zeros_like(kv, dtype=accumulation_dtype(kv))
            accumulate_gradients(dy, q, kv, visible_blocks(source, q.size(2), ctx.sharding), out, lse, dq, dkv)
            dkv += collected()
            collected = start_ring_step(dkv)
            del kv
        dk, dv = collected()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class AllGatherAttention(torch.autograd.Function):
    """Keys and values are gathered, also in backward, whose gradients are then summed where they belong."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sharding: str) -> Tensor:
        out, lse = blockwise_attention(q, enumerate(gather_from_ranks(torch.stack((k, v)))), sharding)
        ctx.sharding = sharding
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        everyone = gather_from_ranks(torch.stack((k, v)))  # (cp, 2, B, K, T, d)
        dq, dkv = (
            torch.zeros_like(q, dtype=accumulation_dtype(q)),
            torch.zeros_like(everyone, dtype=accumulation_dtype(q)),
        )
        for source, kv in enumerate(everyone):
            blocks = visible_blocks(source, q.size(2), ctx.sharding)
            accumulate_gradients(dy, q, kv, blocks, out, lse, dq, dkv[source])
        mine = torch.empty_like(dkv[0])
        reduce_scatter_single(mine, dkv.flatten(0, 1), group=pgm.process_group_manager.cp_group)
        dk, dv = mine
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def gather_from_ranks(x: Tensor) -> Tensor:
    """x of each rank: (...) -> (cp, ...)"""
    grid = pgm.process_group_manager
    everyone = x.new_empty(grid.cp_world_size, *x.shape)
    all_gather_single(everyone.flatten(0, 1), x, group=grid.cp_group)
    return everyone


class AllToAll(torch.autograd.Function):
    """forward: cut x along dimension `split`, a part for each rank, and join what comes along dimension `join`.
    backward: the other way round.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        grid = pgm.process_group_manager
        ctx.split, ctx.join = split, join
        parts = x.unflatten(split, (grid.cp_world_size, -1)).movedim(split, 0).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=grid.cp_group)
        return received.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return AllToAll.apply(dy, ctx.join, ctx.split), None, None


HEADS, SEQUENCE = 1, 2


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, sharding: str, attention_fn: Callable[..., Tensor]) -> Tensor:
    """(B, H, T/cp, d) -> (B, H/cp, T, d), attention as on one rank, and back."""
    size = pgm.process_group_manager.cp_world_size
    positions, order = sequence_order(q.size(SEQUENCE) * size, size, sharding, q.device)
    q, k, v = (AllToAll.apply(x, HEADS, SEQUENCE).index_select(SEQUENCE, order) for x in (q, k, v))
    return AllToAll.apply(attention_fn(q, k, v).index_select(SEQUENCE, positions), SEQUENCE, HEADS)


@functools.cache
def sequence_order(length: int, size: int, sharding: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of all tokens, rank after rank; and where among these position 0 is, 1, 2, ..."""
    positions = torch.cat([local_positions(length, size, rank, sharding) for rank in range(size)]).to(device)
    return positions, positions.argsort()


def check_context_parallel(config: LlamaConfig, layout: Distributed) -> None:
    """Raises UserError if the engine cannot split this model."""
    kv_heads = max(1, config.num_key_value_heads // layout.tp_size)  # of a tp rank
    if layout.cp_engine == "ulysses" and kv_heads % layout.cp_size:
        raise UserError(
            f"cp_engine='ulysses' splits the key/value heads of a tp rank, {kv_heads}, over cp_size={layout.cp_size} ranks; "
            f"use a cp_size that divides them, or cp_engine 'ring'"
        )
    on_blocks = layout.cp_size > 1 and layout.cp_engine != "ulysses"
    if on_blocks and not layout.use_cpu and (config.head_dim % 8 or config.head_dim > 256):
        raise UserError(
            f"cp_engine={layout.cp_engine!r} has GPU kernels for a head_dim that is a multiple of 8, up to 256, not for "
            f"{config.head_dim}; use cp_engine 'ulysses'"
        )


def apply_context_parallel(model: nn.Module, layout: Distributed) -> None:
    """Let the attention layers of `model`, which are called with a part of the sequence, see all of it."""
    if pgm.process_group_manager.cp_world_size == 1:
        return
    for module in model.modules():
        if isinstance(module, Attention):
            # A compiler could not overlap messages, and does not know the kernels; around attention it still helps.
            module.attention_fn = torch.compiler.disable(attend_across_ranks(layout, module.attention_fn))


def attend_across_ranks(layout: Distributed, attention_fn: AttentionFn) -> AttentionFn:
    """Attention of (q, k, v) with a part of the sequence each. (`attend`, of a whole one, is what ulysses uses.)"""
    if layout.cp_engine == "ulysses":
        return functools.partial(ulysses_attention, sharding=layout.cp_sharding, attention_fn=attention_fn)
    function = {"ring": RingAttention, "all_gather": AllGatherAttention}[layout.cp_engine]
    return lambda q, k, v: function.apply(q, k, v, layout.cp_sharding)
