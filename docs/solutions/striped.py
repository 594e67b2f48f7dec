"""docs/context_parallel.md, exercise 3: stripes (Brandon et al. 2023, arXiv:2311.09431), and what is to do."""

import torch
from torch import Tensor


def striped_positions(seq_length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Every cp_size-th token: (seq_length / cp_size,), ascending."""
    return torch.arange(cp_rank, seq_length, cp_size)


def pairs(positions: Tensor) -> int:
    """How many (query, key) pairs a rank computes: a query at position i sees the keys at 0 to i."""
    return int((positions + 1).sum())
