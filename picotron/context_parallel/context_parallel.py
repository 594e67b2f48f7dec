"""Context parallelism: each rank holds T/cp tokens of every sequence, and only attention needs other ranks' tokens.

In causal attention, a token attends to the keys and values of itself and of all tokens before it. In
ring attention (Liu et al. 2023, arXiv:2310.01889), keys and values travel from rank to rank, and each rank attends to
the shard that it has while the next one is on its way:

    cp rank 0 -> cp rank 1 -> cp rank 2 -> cp rank 3 -> cp rank 0

After i steps, a rank has the tensors of the rank i places before it.

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
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype
from picotron.config import Distributed
from picotron.context_parallel.block_attention import Block, BlocksOf, accumulate_gradients, blockwise_attention
from picotron.model.llama import AttentionFn, Llama


def local_chunks(seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> list[range]:
    """Return the chunks of positions that a cp rank holds, in ascending order.

    Args:
        sharding: "contiguous", where the sequence is cut into cp_size chunks, one for each cp rank, or "zigzag", where
            it is cut into 2 cp_size chunks, and cp rank r holds chunk r from the beginning and chunk r from the end.
    """
    count = chunk_count(cp_size, sharding)
    numbers = [cp_rank] if count == cp_size else [cp_rank, count - 1 - cp_rank]
    size = seq_length // count
    return [range(number * size, (number + 1) * size) for number in numbers]


def chunk_count(cp_size: int, sharding: str) -> int:
    """Return the number of chunks into which a sequence is cut, by which its length must be divisible."""
    return 2 * cp_size if sharding == "zigzag" and cp_size > 1 else cp_size


def local_positions(seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> torch.Tensor:
    """Return the positions of the tokens that a cp rank holds, see `local_chunks`: (seq_length / cp_size,)."""
    return torch.cat(
        [torch.arange(each.start, each.stop) for each in local_chunks(seq_length, cp_size, cp_rank, sharding)]
    )


def visible_blocks(source: int, tokens: int, sharding: str) -> list[Block]:
    """Return which of this rank's queries attend to which keys of cp rank `source`, as local indices.

    Args:
        tokens: number of tokens per rank, T/cp.
    """
    rank, full, half = pgm.process_group_manager.cp_rank, slice(0, tokens), tokens // 2
    if source == rank:  # local tokens are in the order of the sequence, even if others lie between them
        return [Block(full, full, causal=True)]
    if sharding == "contiguous":
        return [Block(full, full)] if source < rank else []
    # Zigzag: both chunks of this rank lie between the two chunks of an earlier rank, so all queries attend to the first
    # of these. Both chunks of a later rank lie between the two of this rank, so only its second one attends to them.
    return [Block(full, slice(0, half)) if source < rank else Block(slice(half, tokens), full)]


def start_ring_step(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to send `tensor` to the next cp rank, and to receive a tensor of its shape from the previous one.

    Returns:
        A function that waits for both messages and returns the received tensor. Until then, `tensor` must not change.
    """
    grid = pgm.process_group_manager
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    messages = [
        dist.P2POp(dist.isend, tensor.contiguous(), grid.cp_send_rank, grid.cp_group),
        dist.P2POp(dist.irecv, received, grid.cp_recv_rank, grid.cp_group),
    ]
    handles = dist.batch_isend_irecv(messages)
    results = [received]
    del messages, received

    def finish() -> Tensor:
        while handles:  # each handle keeps its tensor in memory
            handles.pop().wait()
        return results.pop()

    return finish


def ring(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (cp rank, its `tensor`) for all cp ranks, this rank's own first.

    The next tensor arrives while the caller uses the current one. A caller that deletes each tensor after use never has
    more than two of them in memory.
    """
    grid = pgm.process_group_manager
    for step in range(grid.cp_world_size - 1):
        receive = start_ring_step(tensor)
        yield (grid.cp_rank - step) % grid.cp_world_size, tensor
        tensor = receive()
    yield (grid.cp_rank + 1) % grid.cp_world_size, tensor  # cp - 1 steps back is one step ahead


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
        model.attention_fn = torch.compiler.disable(attend_across_ranks(layout.cp_sharding))
        model.cp_sharding = layout.cp_sharding


def attend_across_ranks(sharding: str) -> AttentionFn:
    """Return the attention function for q, k and v that are shards of the sequence, (B, H, T/cp, d)."""
    blocks_of = functools.partial(visible_blocks, sharding=sharding)
    return lambda q, k, v: RingAttention.apply(q, k, v, blocks_of)
