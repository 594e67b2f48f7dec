"""Puzzle 5, data: buckets of gradients that overlap with backward.

To read: docs/data_parallel.md, "Averaging in buckets, while backward is running". Check your answer with
`python -m puzzles 5`.
"""


def make_buckets(ready: list[float], sizes: list[int], latency: float, bandwidth: float) -> list[list[int]]:
    """Put gradients 0, 1, ..., k - 1 into buckets, so that the last all-reduce ends as early as possible.

    Backward completes gradient i, of sizes[i] bytes, at ready[i] seconds; these times ascend. The buckets are reduced
    one after the other, in the order of your list. The all-reduce of a bucket starts when all of its gradients are
    complete and the one before it has ended, and takes latency + bytes / bandwidth seconds. Each gradient is in exactly
    one bucket.

    Score: the seconds that three models spend after the end of backward, together. Par is what the best single limit on
    the bytes of a bucket reaches for each model, if a bucket is closed as soon as it has that many.
    """
    raise NotImplementedError
