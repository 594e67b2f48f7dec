"""Check of puzzle 2: the sums of torch's all-reduce on three and four ranks, and the numbers sent."""

from types import ModuleType

import torch
import torch.distributed as dist

from puzzles.checks.p01_all_reduce import DIGITS
from puzzles.group import Group
from puzzles.pictures import compared, messages, numbers
from puzzles.report import Report, Score
from puzzles.tensors import difference, randn

SIZES = (3, 4)


def least(n: int) -> float:
    """The least that some rank sends in an all-reduce, in units of its vector (Patarasuk and Yuan 2009, Bandwidth
    optimal all-reduce algorithms for clusters of workstations).
    """
    return 2 * (n - 1) / n


def contents(numbers: list[float], n: int) -> str:
    """Describe the first wrong number: digits 2 r and 2 r + 1 of number i are i + 1 if it has that of rank r, once."""
    for i, number in enumerate(numbers):
        digits = [int(number) // 100**rank % 100 for rank in range(n)]
        missing = [rank for rank in range(n) if digits[rank] == 0]
        other = [rank for rank in range(n) if digits[rank] not in (0, i + 1)]
        if missing or other:
            return f"; missing are the numbers of ranks {missing}; of another block, or added twice, those of {other}"
    return ""


def check(learner: ModuleType, group: Group, report: Report) -> None:
    group.forbid("all_reduce", "all_gather", "reduce_scatter")
    n = group.size
    for size in (2 * n, 2 * n + 1):
        x = torch.arange(1.0, size + 1, dtype=torch.float64) * 100**group.rank
        where = f"x = tensor([1, ..., {size}]) * 100**rank"
        report.begin(where)
        expected = x.clone()
        dist.all_reduce(expected)
        result, _ = group.call(learner.ring_all_reduce, x, group)
        results = group.gather(numbers(result))
        by_rank = {f"rank {rank}": found for rank, found in enumerate(results)}
        report.picture = compared(f"The sum on {n} ranks, x of {size} numbers", by_rank, expected.tolist(), DIGITS)
        found = difference(result, expected)
        group.require(not found, f"{group.here}{where}: {found}{contents(results[group.rank], n)}")
    x = randn(n, 60, seed=0)
    report.begin("x of 60 random numbers")
    result, sent = group.call(learner.ring_all_reduce, x[group.rank], group)
    group.expect(result, x.sum(0), report.case)
    report.picture = messages(group.gather(group.log), 1, "numbers, of 60")
    busiest = max(group.gather(sent)) / 60
    report.score = Score(
        f"sent by the busiest of {n} ranks, divided by the size of x:", busiest, least(n), least(n), "{:.3f}"
    )
