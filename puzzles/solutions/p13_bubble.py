"""Solution of puzzle 13: 1F1B with split backwards, whose last W are delayed. The best one known is ZB-H1:

python -m workbench.drawing schedule zb_h1 --pp 4 --micro_batches 8
"""

P, M = 4, 8


def program(rank: int) -> list[str]:
    warmup = P - 1 - rank
    actions = [f"{rank}F{i}" for i in range(warmup)]
    # The last `rank` W are delayed, because the ranks before wait for each I.
    for i in range(M):
        forward = [f"{rank}F{warmup + i}"] if warmup + i < M else []
        actions += [*forward, f"{rank}I{i}"]
        if i < M - rank:
            actions.append(f"{rank}W{i}")
    return actions + [f"{rank}W{i}" for i in range(M - rank, M)]
