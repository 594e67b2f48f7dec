"""Positions in the sequence that each context-parallel rank holds, and which of them attend to which."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from picotron import process_group_manager as pgm


class Block(NamedTuple):
    """Queries of this rank and the keys of a rank to which they attend, in some rows of the batch."""

    queries: slice
    keys: slice
    causal: bool = False
    rows: slice = slice(None)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the block's part of x (B, H, T/cp, ...), a tensor with an entry for each query of this rank."""
        return x[self.rows, :, self.queries]

    def of_keys(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's keys and values from kv (2, B, K, T/cp, d), which has all keys and values of a rank."""
        return kv[0, self.rows, :, self.keys], kv[1, self.rows, :, self.keys]

    @property
    def new_shape(self) -> bool:
        """Whether blocks of other micro-batches have other shapes, for which cuDNN would plan anew."""
        return self.rows != slice(None)


BlocksOf = Callable[[int, int], list[Block]]
"""function of a cp rank and the number of tokens per rank, T/cp: `visible_blocks`, or `packed_blocks`"""


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
