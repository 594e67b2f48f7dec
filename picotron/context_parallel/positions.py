"""Positions in the sequence that each context-parallel rank holds."""

import torch


def local_positions(seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> torch.Tensor:
    """Return the positions of the tokens that a cp rank holds: (seq_length / cp_size,), ascending.

    Args:
        sharding: "contiguous", where the sequence is cut into cp_size chunks, one for each cp rank, or "zigzag", where
            it is cut into 2 cp_size chunks, and cp rank r holds chunk r from the beginning and chunk r from the end.
    """
    if sharding == "contiguous":
        return torch.arange(seq_length).chunk(cp_size)[cp_rank]
    chunks = torch.arange(seq_length).chunk(2 * cp_size)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))
