"""Puzzle 13, pipeline: a smaller bubble than 1F1B.

To read: docs/pipeline_schedules.md, "All schedules on one time axis". Check your answer with `python -m puzzles 13`.
"""


def program(rank: int) -> list[str]:
    """Return the actions of one of p = 4 ranks for m = 8 micro-batches: a schedule with a bubble below that of 1F1B.

    The actions are those of puzzle 12, and two more: instead of the backward "2B0", a rank may run its halves "2I0" and
    "2W0". I computes the gradient of the stage's input, which the stage before waits for, and W those of the weights,
    any time later. Each half takes as long as a forward. Activations are held until the end of the W.

    No rank may ever hold the activations of more than 4 micro-batches, the most that 1F1B holds.

    (The page shows a schedule that reaches the best known bubble, zb_h1: try without it first.)

    Score: the bubble. That of 1F1B is 27.3 %; splitting every backward and running W directly after I gives 20.0 %. Par
    also delays some of the W, to fill idle time at the end.
    """
    raise NotImplementedError
