"""Solution of puzzle 21. docs/slow.md has the evidence for each run."""


def cause(run: str) -> str:
    return {
        "a": "exposed all-reduce",
        "b": "small micro-batches",
        "c": "late data",
        "d": "recomputation",
        "e": "slow rank",
        "f": "bubble",
    }[run]
