"""Puzzle 12, pipeline: one forward, one backward.

To read: docs/pipeline_parallel.md, "1F1B: one forward, one backward". Check your answer with `python -m puzzles 12`.
"""


def program(rank: int, p: int, m: int) -> list[str]:
    """Return the actions of one of p pipeline ranks in the 1F1B schedule, in the order in which it runs them.

    Rank r has stage r. "2F0" is the forward of micro-batch 0 through stage 2, and "2B0" its backward; all m
    micro-batches need both. A forward needs the result of the same micro-batch in the stage before; a backward, that
    of the stage after. A backward takes twice as long as a forward, and messages take no time.

    No step may be longer than that of AFAB (all forward, all backward), whose bubble is (p - 1) / (m + p - 1). Rank r
    may hold the activations of at most p - r micro-batches: of those whose forward has started, and whose backward
    has not ended.
    """
    raise NotImplementedError
