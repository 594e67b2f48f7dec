"""Solution of puzzle 12."""


def program(rank: int, p: int, m: int) -> list[str]:
    warmup = min(p - 1 - rank, m)
    actions = [f"{rank}F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        actions += [f"{rank}F{warmup + i}", f"{rank}B{i}"]
    return actions + [f"{rank}B{i}" for i in range(m - warmup, m)]
