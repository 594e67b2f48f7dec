"""Puzzle 10, context: attention to all keys from attention to two halves of them.

To read: docs/context_parallel.md, "Merging blocks of attention". Check your answer with `python -m puzzles 10`.
"""

import torch
from torch import Tensor


def merge(y1: Tensor, lse1: Tensor, y2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention y (H, T, d) to two blocks of keys together, and its lse (H, T).

    y1 (H, T, d) is the attention of T queries to the first block alone, a mean of values that is weighted by
    exp(score); lse1 (H, T) is the logarithm of the sum of these weights. y2 and lse2 belong to the second block. The
    scores are in the hundreds or thousands, so exp(lse) can overflow. If a query
    attends to no key of a block, its y there is 0 and its lse is -inf; this is never true of both blocks.
    """
    raise NotImplementedError
