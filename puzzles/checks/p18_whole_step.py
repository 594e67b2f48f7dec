"""Check of puzzle 18: a step of torch's SGD and clipping on one process."""

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import verdicts
from puzzles.report import Report
from puzzles.tensors import difference, randn

SIZES = (4,)
D, HIDDEN, T = 6, 8, 5
NAMES = ("the norm", "up", "down", "bias")


def check(learner: ModuleType, group: Group, report: Report) -> None:
    d, t = divmod(group.rank, 2)
    tp, dp = Group(own_group((0, 1), (2, 3))), Group(own_group((0, 2), (1, 3)))
    for scale in (1.0, 0.1):  # the first gradient is clipped
        where = report.case = f"weights and targets times {scale:g}"
        report.begin(where)
        shapes = ((HIDDEN, D), (D, HIDDEN), (D,))
        start = [scale * randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        full = [torch.nn.Parameter(each.clone()) for each in start]
        x, target = randn(2 * T, D, seed=10), scale * randn(2 * T, D, seed=11)
        (F.silu(x @ full[0].T) @ full[1].T + full[2] - target).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(full, 1.0)
        torch.optim.SGD(full, lr=0.1).step()
        expected, sent = (norm, *own(full, t)), tp.sent
        result, _ = group.call(learner.step, *own(start, t), x.chunk(2)[d], target.chunk(2)[d], tp, dp)
        pairs = zip(NAMES, result, expected, strict=False) if isinstance(result, tuple | list) else ()
        right = {name: not difference(ours, own, tolerance=1e-6) for name, ours, own in pairs}
        report.picture = verdicts("The results on rank 0", right)
        group.expect(result, expected, where, NAMES, tolerance=1e-6)  # torch adds 1e-6 to the norm by which it divides
        enough = 2 * T * D + 10
        group.require(
            tp.sent - sent <= enough,
            f"the step is right, but a rank sends {tp.sent - sent:g} numbers on tp; {enough} suffice",
        )


def own_group(*rows: tuple[int, ...]) -> dist.ProcessGroup:
    """Create all groups, as every rank must, and return this rank's."""
    groups = [dist.new_group(list(ranks)) for ranks in rows]
    return next(group for ranks, group in zip(rows, groups, strict=True) if dist.get_rank() in ranks)


def own(full: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return the shards of up, down and bias on a tp rank."""
    up, down, bias = (each.detach() for each in full)
    return [up.chunk(2)[rank], down.chunk(2, 1)[rank], bias]
