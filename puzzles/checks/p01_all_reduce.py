"""Check of puzzle 1: the sums that torch's all-reduce computes, on three ranks."""

from types import ModuleType

import torch
import torch.distributed as dist

from puzzles.group import Group
from puzzles.pictures import compared, numbers
from puzzles.report import Report
from puzzles.tensors import randn

SIZES = (3,)
DIGITS = "Red: wrong. Rank r adds (i + 1) 100^r to number i, so the digits show whose numbers are in a sum."


def check(learner: ModuleType, group: Group, report: Report) -> None:
    group.forbid("all_reduce")
    for size in (6, 7, 1, 1000, 7):  # 7 again at the end, for the picture
        if size == 1000:
            compare(learner, group, report, randn(group.size, size, seed=0)[group.rank], "x of 1000 random numbers")
            continue
        x = torch.arange(1.0, size + 1, dtype=torch.float64) * 100**group.rank
        compare(learner, group, report, x, f"x = tensor([1, ..., {size}]) * 100**rank")


def compare(learner: ModuleType, group: Group, report: Report, x: torch.Tensor, where: str) -> None:
    report.begin(where)
    expected = x.clone()
    dist.all_reduce(expected)
    result, sent = group.call(learner.all_reduce, x, group)
    if x.numel() < 20:
        results = {f"rank {rank}": found for rank, found in enumerate(group.gather(numbers(result)))}
        report.picture = compared(f"The sum on each rank, {where}", results, expected.tolist(), DIGITS)
    group.expect(result, expected, where)
    share = 2 * (group.size - 1) / group.size
    most = share * (x.numel() + group.size - 1)  # with padding
    enough = f"an all-reduce sends 2 (n - 1)/n P = {share * x.numel():g}, with padding at most {most:g}"
    group.require(sent <= most, f"{group.here}{where}: the sums are right, but {sent:g} numbers are sent; {enough}")
