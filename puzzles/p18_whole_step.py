"""Puzzle 18, layout: a whole training step over dp 2 x tp 2.

To read: docs/data_parallel.md, "The line that does it". Check your answer with `python -m puzzles 18`.
"""

from torch import Tensor

from puzzles.group import Group

LEARNING_RATE, MAX_NORM = 0.1, 1.0


def step(
    up: Tensor, down: Tensor, bias: Tensor, x: Tensor, target: Tensor, tp: Group, dp: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (norm of the gradient, new up, new down, new bias) after a step of SGD with clipping.

    The model is y = silu(x up') down' + bias, with up (F, D), down (D, F) and bias (D,). The loss is the mean of
    (y - target)^2 over the whole batch. Each of the four ranks has

        up    (F/tp, D)    its rows, those of its tp rank
        down  (D, F/tp)    its columns
        bias  (D,)         all of it, as every rank
        x, target (T, D)   those of its dp rank: half of the batch, the same on both tp ranks

    The norm is that of the gradient of all parameters as one vector, as on one process. If it is larger than MAX_NORM,
    multiply the gradient by MAX_NORM / norm; then subtract LEARNING_RATE times the gradient from the weights.

    `tp` has this rank and the one with the other half of the matrices; `dp`, the one with the other half of the batch.
    You need `tp.all_reduce(x)` and `dp.all_reduce(x)`, which return the sum, and which autograd does not see: see
    puzzle 7. On tp, a rank may send two all-reduces of (T, D), forward and backward together, and 10 numbers.
    """
    raise NotImplementedError
