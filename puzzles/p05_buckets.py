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

    Score: the time that three models spend after the end of backward, together. Par is what a single limit reaches for
    each model: close a bucket as soon as it has that many bytes, and take the best power of two as the limit.
    """
    raise NotImplementedError
