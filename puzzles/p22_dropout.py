"""Puzzle 22, layout: dropout that is equal in every layout.

To read: docs/numerics.md, "Random bits: equal in every layout". Check your answer with `python -m puzzles 22`.
"""

from torch import Tensor

RATE = 0.25


def dropout(y: Tensor, samples: Tensor, positions: Tensor, layer: int) -> Tensor:
    """Return y / (1 - RATE), with 0 instead of a share RATE of its numbers.

    y (B, T, D) are hidden states after layer number `layer`. Row b belongs to the sample with the number samples[b],
    which occurs once in a run; column t, to the position positions[t] of a sequence. A dp rank has some of the samples,
    a cp rank or with sequence parallelism a tp rank some of the positions, a pp rank some of the layers, in any order,
    and recomputation calls the function once more.

    Whether a number is dropped depends on its sample, position, layer and place in D, and on nothing else; numbers that
    differ in any of them are dropped independently. Other code uses torch's own generator, so leave its state as it is.
    """
    raise NotImplementedError
