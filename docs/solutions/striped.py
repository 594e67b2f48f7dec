"""Solution to exercise 2 of docs/context_parallel.md: stripes (Brandon et al. 2023, arXiv:2311.09431), counted."""

import torch
from torch import Tensor


def striped_positions(seq_length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return every cp_size-th position, beginning at cp_rank: (seq_length / cp_size,), ascending."""
    return torch.arange(cp_rank, seq_length, cp_size)


def pairs(positions: Tensor) -> int:
    """Return the number of query-key pairs of a rank: a query at position i attends to the keys at 0 to i."""
    return int((positions + 1).sum())
