"""Puzzle 9, context: which rank gets which part of a sequence.

To read: docs/context_parallel.md, "Which tokens each rank gets: contiguous or zigzag". Check your answer with
`python -m puzzles 9`.
"""


def owner(chunk: int, cp: int) -> int:
    """Return the rank, 0 to cp - 1, that holds chunk number `chunk`, 0 to 2 cp - 1, of the sequence.

    The sequence is cut into 2 cp chunks of equal length, and each rank gets two of them. A rank computes the attention
    of its own tokens: each attends to itself and to all tokens before it in the sequence, whichever rank holds them.

    Score: query-key pairs of the busiest of 4 ranks, divided by the mean. Par is 1: all ranks have the same work.
    A chunk has 6 tokens here. Contiguous chunks score 1.735, not 14/8 = 1.75 as in a count of blocks, because a block
    on the diagonal has 21 of 36 pairs, a little more than half.
    """
    raise NotImplementedError
