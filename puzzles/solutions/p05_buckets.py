"""Solution of puzzle 5: dynamic programming."""


def make_buckets(ready: list[float], sizes: list[int], latency: float, bandwidth: float) -> list[list[int]]:
    # best[b]: the earliest end of the reduction of gradients 0 to b - 1, and where their last bucket begins.
    best = [(0.0, 0)]
    for b in range(1, len(sizes) + 1):
        ends = []
        for a in range(b):
            start = max(best[a][0], ready[b - 1])
            ends.append((start + latency + sum(sizes[a:b]) / bandwidth, a))
        best.append(min(ends))
    buckets, b = [], len(sizes)
    while b > 0:
        a = best[b][1]
        buckets.append(list(range(a, b)))
        b = a
    return buckets[::-1]
