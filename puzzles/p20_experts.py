"""Puzzle 20, experts: send tokens to their experts, and bring the results home.

To read: docs/expert_parallel.md, "Two all-to-alls". Check your answer with `python -m puzzles 20`.
"""

from collections.abc import Callable

from torch import Tensor

from puzzles.group import Group


def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, run: Callable[[int, Tensor], Tensor], experts: int, group: Group
) -> Tensor:
    """Return the sum of the outputs of each token's experts, times their weights: (N, D).

    A rank has N tokens x (N, D), of which a router has chosen the experts `chosen` (N, k), numbers of 0 to E - 1 that
    differ within a row, with the weights (N, k). Of the E = `experts` experts, rank r has numbers r E/n to (r + 1) E/n
    - 1. `run(e, rows)` computes the output of expert e, which must be one of this rank's: (R, D) -> (R, D). Some
    experts have no tokens, and no token is dropped. Use `group.send(y, to)` and `group.recv(source)`; messages of a
    rank to another one arrive in order, and a message may have no rows. A row is sent only to a rank that computes it,
    and back. Besides rows, a rank may send one number for each expert.
    """
    raise NotImplementedError
