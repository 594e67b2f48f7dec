"""Puzzle 3, data: which rank trains on a sample, and when.

To read: docs/training_step.md, "How a global batch is split". Check your answer with `python -m puzzles 3`.
"""


def place(sample: int, B: int, m: int, dp: int) -> tuple[int, int, int, int]:
    """Return the step, the micro-batch, the data-parallel rank and the row in which a sample is used, all from 0.

    A micro-batch has B rows. In each step, each of dp ranks runs m micro-batches, so a step uses B m dp samples. The
    first micro-batches of all ranks use the first samples of the step: rank 0 the first B, rank 1 the next B, and so
    on; then come the second micro-batches of all ranks. So with B = 2, m = 4 and dp = 2, sample 5 is row 1 of
    micro-batch 1 on rank 0, in step 0: place(5, 2, 4, 2) == (0, 1, 0, 1).
    """
    raise NotImplementedError
