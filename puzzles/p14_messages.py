"""Puzzle 14, pipeline: 1F1B when messages take time.

To read: docs/pipeline_parallel.md, "The algorithm of 1F1B". Check your answer with `python -m puzzles 14`.
"""


def program(rank: int, p: int, m: int, p2p: float) -> list[str]:
    """Return the actions of one of p pipeline ranks, with which slow messages delay the step no more than in AFAB.

    The actions are those of puzzle 12: "2F0" and "2B0", each once per micro-batch, and a backward takes twice as long
    as a forward. A message from a stage to the next one, or back, takes the time p2p, in forwards. Ranks compute while
    a message is on its way.

    With p2p > 0, 1F1B is slower than AFAB (all forward, all backward): each rank waits for a backward that comes later
    than its forwards end. No schedule that picotron knows by name is as fast as AFAB
    without holding all m micro-batches. Yours has to be as fast as AFAB for every p2p.

    Score: the micro-batches whose activations a rank holds at most, summed over the 4 ranks, with m = 16 and p2p = 1.
    AFAB holds 64, and 1F1B 10. Par is 16.
    """
    raise NotImplementedError
