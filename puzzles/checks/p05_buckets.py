"""Check of puzzle 5: every gradient is in one bucket; and the end of the last all-reduce, compared with the least."""

import itertools
from collections import Counter
from types import ModuleType
from typing import NamedTuple

from docs.programs.svg import Span, colour_of, spans
from puzzles.group import Group
from puzzles.report import Report, Score, kind


class Case(NamedTuple):
    """The backward of a model and its network: seconds, bytes, and bytes/s."""

    ready: list[float]
    sizes: list[int]
    latency: float
    bandwidth: float


def case(layers: int, D: int, F: int, embedding: int, layer_time: float, latency: float, bandwidth: float) -> Case:
    """Return a model of layers with the matrices down, up, gate, o, v, k, q and two norms, and an embedding, in the
    order of backward. A gradient takes time in proportion to its size.
    """
    layer = [D * F, D * F, D * F, D, D * D, D * D // 4, D * D // 4, D * D, D]
    sizes = [4 * each for each in layer * layers + [embedding * D]]
    per_byte = layer_time / (4 * sum(layer))
    times = [size * per_byte for size in sizes[:-1]] + [0.1 * layer_time]  # the gradient of an embedding is a scatter
    return Case(list(itertools.accumulate(times)), sizes, latency, bandwidth)


CASES = [
    case(4, 512, 1408, 8192, 2e-3, 2e-4, 4e9),  # a tiny model, for which latency counts
    case(8, 2048, 5632, 32000, 10e-3, 4e-4, 30e9),  # a network that keeps up with backward
    case(8, 2048, 5632, 32000, 10e-3, 4e-3, 12e9),  # a network that does not
]
# Not for the score: with most limits, the last gradients do not fill a bucket, and must not be forgotten.
SMALL_LAST = Case([1e-3 * i for i in range(1, 8)], [2**23] * 6 + [2**10], 1e-4, 1e10)


def span_of(bucket: list[int], case: Case, free: float) -> tuple[float, float]:
    """Return when the all-reduce of a bucket starts and ends, if the network is free from a time on."""
    start = max(free, *(case.ready[i] for i in bucket))
    return start, start + case.latency + sum(case.sizes[i] for i in bucket) / case.bandwidth


def end(buckets: list[list[int]], case: Case) -> float:
    """Return when the last all-reduce ends."""
    time = 0.0
    for bucket in buckets:
        _, time = span_of(bucket, case, time)
    return time


def with_limit(limit: float, case: Case) -> list[list[int]]:
    """Close a bucket as soon as it has `limit` bytes."""
    buckets: list[list[int]] = [[]]
    for i in range(len(case.sizes)):
        if sum(case.sizes[j] for j in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def best_with_limit(case: Case) -> float:
    """Return the end with the best limit that is a power of two."""
    return min(end(with_limit(2.0**k, case), case) for k in range(sum(case.sizes).bit_length() + 1))


def earliest(case: Case) -> float:
    """Return the earliest end of all. If the first b gradients are reduced as early as possible, so can the others be;
    exchanging gradients of two buckets so that they are in order delays nothing, so only ranges matter.
    """
    least = [0.0]
    for b in range(1, len(case.sizes) + 1):
        ends = (
            max(least[a], case.ready[b - 1]) + case.latency + sum(case.sizes[a:b]) / case.bandwidth for a in range(b)
        )
        least.append(min(ends))
    return least[-1]


def check(learner: ModuleType, group: Group, report: Report) -> None:
    picture, after = "", {"yours": 0.0, "par": 0.0, "best": 0.0}
    for number, each in enumerate([*CASES, SMALL_LAST]):
        k = len(each.sizes)
        where = f"model {number} of {k} gradients"
        report.begin(where)
        buckets = learner.make_buckets(list(each.ready), list(each.sizes), each.latency, each.bandwidth)
        lists = buckets if isinstance(buckets, list) and all(isinstance(bucket, list) for bucket in buckets) else []
        numbers = [type(i) is int for bucket in lists for i in bucket]
        good = bool(lists) and all(lists) and all(numbers)
        expected = "expected a list of lists of numbers, such as [[0, 1], [2]], none of them empty"
        group.require(good, f"{where}: {expected}, but got {kind(buckets)}")
        counts = Counter(itertools.chain(*buckets))
        for i in sorted({*counts, *range(k)}):
            due = int(i in range(k))
            group.require(counts[i] == due, f"{where}: gradient {i} is in {counts[i]} buckets, expected {due}")
        if each is SMALL_LAST:
            continue
        if number == 0:
            picture = draw(buckets, each)
        for name, time in (("yours", end(buckets, each)), ("par", best_with_limit(each)), ("best", earliest(each))):
            after[name] += 1000 * (time - each.ready[-1])
    report.picture = picture
    report.score = Score("after backward", after["yours"], after["par"], after["best"], "{:.2f} ms")


def draw(buckets: list[list[int]], case: Case) -> str:
    """Draw backward above the all-reduces, on one time axis."""
    colours = {i: colour_of(number) for number, bucket in enumerate(buckets) for i in bucket}
    boxes, time = [], 0.0
    for i, (start, stop) in enumerate(itertools.pairwise([0.0, *case.ready])):
        boxes.append(Span("backward", 1000 * start, 1000 * stop, colours[i], title=f"gradient {i}"))
    for number, bucket in enumerate(buckets):
        start, time = span_of(bucket, case, time)
        size = sum(case.sizes[i] for i in bucket) / 2**20
        title = f"bucket {number}: {size:.1f} MiB, {1000 * start:.2f} to {1000 * time:.2f} ms"
        boxes.append(Span("all-reduces", 1000 * start, 1000 * time, colours[bucket[0]], str(number), title))
    return spans({"Backward of a tiny model, a box for each gradient": boxes}, ("backward", "all-reduces"), "ms")
