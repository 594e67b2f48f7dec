"""Positions in the sequence that each context-parallel rank holds."""

import torch


def local_positions(seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> torch.Tensor:
    """Return the positions of the tokens that a cp rank holds: (seq_length / cp_size,), ascending.

    Args:
        sharding: "contiguous", where the sequence is cut into cp_size chunks, one for each cp rank, or "zigzag", where
            it is cut into 2 cp_size chunks, and cp rank r holds chunk r from the beginning and chunk r from the end.
    """
    chunks, size = local_chunks(seq_length, cp_size, cp_rank, sharding)
    return torch.cat([torch.arange(start, start + size) for start in chunks])


def tokens_before(position: int, seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> int:
    """Return how many of the tokens that a cp rank holds precede a position in the sequence."""
    chunks, size = local_chunks(seq_length, cp_size, cp_rank, sharding)
    return sum(min(max(position - start, 0), size) for start in chunks)


def local_chunks(seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> tuple[list[int], int]:
    """Return the positions at which a rank's chunks begin, and the size of a chunk."""
    if sharding == "contiguous":
        size = seq_length // cp_size
        return [cp_rank * size], size
    size = seq_length // (2 * cp_size)
    return [cp_rank * size, (2 * cp_size - 1 - cp_rank) * size], size
