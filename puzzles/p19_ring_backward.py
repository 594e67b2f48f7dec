"""Puzzle 19, context: the backward of ring attention, without the scores of its forward.

To read: docs/context_parallel.md, "The backward: send keys again instead of keeping them". Check your answer with
`python -m puzzles 19`.
"""

import torch
from torch import Tensor

from puzzles.group import Group


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients dq, dk and dv (H, T/n, d) of this rank's queries, keys and values.

    Tokens and scores are those of puzzle 11: rank r has tokens r T/n to (r + 1) T/n - 1, and attention is causal. Its
    forward has kept this rank's output `out` (H, T/n, d) and `lse` (H, T/n), the log-sum-exp of the scores of each of
    its queries to the keys of all ranks; `dout` is the gradient of `out`. Keys of a rank have gradients from the
    queries of all later ranks, too. Use messages only, as in puzzle 11.

    Score: how many numbers a rank sends, on average over 4 ranks, in units of one rank's k and v. Par is the full ring:
    each k and v visits every rank, and its gradients come home after n messages.
    """
    raise NotImplementedError
