"""Puzzle 11, context: causal attention over a sequence that no rank has in full.

To read: docs/context_parallel.md, "Ring attention" and "Merging blocks of attention". Check your answer with
`python -m puzzles 11`.
"""

import torch
from torch import Tensor

from puzzles.group import Group


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Return the causal attention of this rank's queries to the keys of all ranks: (H, T/n, d).

    Rank r has queries, keys and values (H, T/n, d) of tokens r T/n to (r + 1) T/n - 1. A token attends to itself and to
    all tokens before it, with scores q @ k.mT / sqrt(d), as in `torch.nn.functional.scaled_dot_product_attention`.
    Use messages only, no collectives: `group.send(y, to)` sends a tensor and returns immediately;
    `group.recv(source)` returns the next one from a rank.

    Score: how many keys and values a rank sends, on average over 4 ranks, in units of one rank's k and v. Par is the
    full ring: each k and v visits every rank.
    """
    raise NotImplementedError
