"""Solution of puzzle 13: 1F1B whose last backwards are split. The best one known, ZB-H1, splits all of them:

python -m picotron.schedules.draw --schedule zb_h1 --pp 4 --microbatches 8
"""

P, M = 4, 8


def program(rank: int) -> list[str]:
    warmup = P - 1 - rank
    actions = [f"{rank}F{i}" for i in range(warmup)]
    # The last `rank` backwards are split, because the ranks before wait for them, and only for I.
    for i in range(M):
        forward = [f"{rank}F{warmup + i}"] if warmup + i < M else []
        actions += [*forward, f"{rank}{'B' if i < M - rank else 'I'}{i}"]
    return actions + [f"{rank}W{i}" for i in range(M - rank, M)]
