"""Puzzle 17, pipeline: a step of 1F1B, with its messages.

To read: docs/pipeline_parallel.md, "1F1B: one forward, one backward". Check your answer with `python -m puzzles 17`.
"""

from collections.abc import Callable

from torch import Tensor, nn

from puzzles.group import Group


def step(stage: nn.Module, inputs: list[Tensor], loss: Callable[[Tensor, int], Tensor], group: Group) -> float:
    """Run a training step of a pipeline of p ranks, in the order of 1F1B, and return the mean loss on the last rank; on
    the others, return 0.0.

    `stage` is this rank's part of the model: stage(x) maps x (T, D) to y (T, D), and saves what its backward needs. y
    is the next rank's x. Only rank 0 uses the `inputs`, the m micro-batches x (T, D); the others use their number. On
    the last rank, loss(y, i) is the loss of micro-batch i. Afterwards, each parameter of `stage` must have in `.grad`
    the gradient of the mean of the m losses; it is None at first.

    `group.send(x, to)` sends a tensor to a rank and returns immediately. `group.recv(source)` waits for the next one
    from a rank. This rank is `group.rank` of `group.size`. Autograd sees neither, so what returns from the next rank is
    a gradient that you give to autograd.

    Rank r may hold the activations of at most p - r micro-batches: call stage(x) for the next one only when the
    backward of an earlier one has ended. No rank calls stage twice for a micro-batch.
    """
    raise NotImplementedError
