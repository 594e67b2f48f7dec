"""Which queries attend to which keys if rows hold several documents, each of which attends to itself only."""

import functools
from collections.abc import Callable
from itertools import pairwise

from picotron import process_group_manager as pgm
from picotron.context_parallel.positions import local_chunks, visible_blocks
from picotron.packed_attention import PackedDocuments

WHOLE_BATCH = slice(None)  # rows of a block that has the same shape in every micro-batch
PackedBlock = tuple[slice, slice, slice, bool]
BlocksOf = Callable[[int, int], list[PackedBlock]]  # `packed_blocks` of a cp rank and a number of tokens


def packed_blocks(source: int, tokens: int, sharding: str, documents: PackedDocuments | None) -> list[PackedBlock]:
    """Cut `visible_blocks` so that queries attend to keys of their own document only: (rows, queries, keys, causal)."""
    blocks = visible_blocks(source, tokens, sharding)
    if documents is None:
        return [(WHOLE_BATCH, *block) for block in blocks]
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
                cut.append((slice(row, row + 1), q, k, causal))
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
