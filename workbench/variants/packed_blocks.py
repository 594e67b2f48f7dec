"""Context parallelism in rows that hold several documents, see `model.packed`."""

import functools
from itertools import pairwise

from picotron import process_group_manager as pgm
from picotron.context_parallel.block_attention import Block
from picotron.context_parallel.context_parallel import local_chunks, visible_blocks
from workbench.variants.packed import PackedDocuments


def packed_blocks(source: int, tokens: int, sharding: str, documents: PackedDocuments) -> list[Block]:
    """Cut `visible_blocks` so that queries attend to keys of their own document only."""
    grid, cut = pgm.process_group_manager, list[Block]()
    own, others = (
        local_documents(documents.boundaries, tokens * grid.cp_world_size, grid.cp_world_size, rank, sharding)
        for rank in (grid.cp_rank, source)
    )
    for queries, keys, causal, *_ in visible_blocks(source, tokens, sharding):
        for (row, first_query, last_query), (_, first_key, last_key) in zip(own, others, strict=True):
            q = slice(max(first_query, queries.start), min(last_query, queries.stop))
            k = slice(max(first_key, keys.start), min(last_key, keys.stop))
            if q.start < q.stop and k.start < k.stop:
                cut.append(Block(q, k, causal, slice(row, row + 1), new_shape=True))
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
