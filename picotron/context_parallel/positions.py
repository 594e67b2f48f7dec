"""Positions in the sequence that each context-parallel rank holds, and which of them attend to which."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.model.attention import PackedDocuments

Block = tuple[slice, slice, bool]


class PackedBlock(NamedTuple):
    """Queries of this rank and the keys of a rank to which they attend, in some rows of the batch."""

    queries: slice
    keys: slice
    causal: bool
    rows: slice = slice(None)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the part of x (B, H, T/cp, ...), numbers of this rank's queries."""
        return x[self.rows, :, self.queries]

    def of_keys(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of the keys and of the values in kv (2, B, K, T/cp, d), those of a rank."""
        return kv[0, self.rows, :, self.keys], kv[1, self.rows, :, self.keys]

    @property
    def new_shape(self) -> bool:
        """Whether blocks of other micro-batches have other shapes, for which cuDNN would plan anew."""
        return self.rows != slice(None)


BlocksOf = Callable[[int, int], list[PackedBlock]]  # `packed_blocks` of a cp rank and a number of tokens


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
    """Return which of this rank's queries attend to which keys of cp rank `source`: (queries, keys, causal), as local
    indices.

    Args:
        tokens: number of tokens per rank, T/cp.
    """
    rank, full, half = pgm.process_group_manager.cp_rank, slice(0, tokens), tokens // 2
    if source == rank:
        return [(full, full, True)]  # the order of local tokens is that of the sequence, even if others lie between
    if sharding == "contiguous":
        return [(full, full, False)] if source < rank else []
    # Zigzag: both chunks of this rank lie between the two chunks of an earlier rank, so all queries attend to the first
    # of these. Both chunks of a later rank lie between the two of this rank, so only its second one attends to them.
    return [(full, slice(0, half), False)] if source < rank else [(slice(half, tokens), full, False)]


def packed_blocks(source: int, tokens: int, sharding: str, documents: PackedDocuments | None) -> list[PackedBlock]:
    """Cut `visible_blocks` so that queries attend to keys of their own document only."""
    blocks = visible_blocks(source, tokens, sharding)
    if documents is None:
        return [PackedBlock(*block) for block in blocks]
    grid, cut = pgm.process_group_manager, list[PackedBlock]()
    own, others = (
        local_documents(documents.boundaries, tokens * grid.cp_world_size, grid.cp_world_size, rank, sharding)
        for rank in (grid.cp_rank, source)
    )
    for queries, keys, causal in blocks:
        for (row, first_query, last_query), (_, first_key, last_key) in zip(own, others, strict=True):
            q = slice(max(first_query, queries.start), min(last_query, queries.stop))
            k = slice(max(first_key, keys.start), min(last_key, keys.stop))
            if q.start < q.stop and k.start < k.stop:
                cut.append(PackedBlock(q, k, causal, slice(row, row + 1)))
    return cut


@functools.lru_cache(maxsize=128)  # all layers use the same ones
def local_documents(
    boundaries: tuple[int, ...], length: int, cp_size: int, cp_rank: int, sharding: str
) -> list[tuple[int, int, int]]:
    """Return the row of each document, and the range of a rank's tokens in it: they are consecutive, because a rank's
    tokens are in the order of the sequence.
    """
    ranges, chunks = [], local_chunks(length, cp_size, cp_rank, sharding)
    for start, end in pairwise(boundaries):
        row = start // length
        first, last = (
            sum(min(max(boundary - row * length - chunk.start, 0), len(chunk)) for chunk in chunks)
            for boundary in (start, end)
        )
        ranges.append((row, first, last))
    return ranges
