"""Puzzle 21, speed: why a run is slow.

To read: docs/slow.md, "Six parts of a step". Check your answer with `python -m puzzles 21`.
"""


def cause(run: str) -> str:
    """Return the cause for which a run, "a" to "f", is slower than the healthy one: "late data", "small micro-batches",
    "recomputation", "slow rank", "bubble" or "exposed all-reduce". Each is the cause of one run.

    All runs train the same model on the same tokens, on two pp ranks. puzzles/slow_runs/ has a recorded step and the
    metrics of each. `python -m workbench.drawing measured puzzles/slow_runs/a` draws the step; you can also compute the
    answer.
    """
    raise NotImplementedError
