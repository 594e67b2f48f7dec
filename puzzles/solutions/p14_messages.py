"""Solution of puzzle 14: a longer warm-up. Each stage further from the end adds a round trip of 3 + 2 p2p forwards to
the time until a backward arrives, in which a rank runs a micro-batch every 3 forwards.
"""

import math


def program(rank: int, p: int, m: int, p2p: float) -> list[str]:
    per_stage = math.ceil((3 + 2 * p2p) / 3)  # micro-batches that start during one round trip
    warmup = min(1 + per_stage * (p - 1 - rank), m)
    actions = [f"{rank}F{i}" for i in range(warmup)]
    for i in range(m):
        actions.append(f"{rank}B{i}")
        if warmup + i < m:
            actions.append(f"{rank}F{warmup + i}")
    return actions
