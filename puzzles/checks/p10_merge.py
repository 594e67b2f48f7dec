"""Check of puzzle 10: attention to all keys at once, computed with torch's softmax."""

import math
from types import ModuleType

import torch
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import compared, numbers
from puzzles.report import Report
from puzzles.tensors import difference, randn

H, T, d, KEYS = 2, 5, 4, 8
NAMES = ("y", "lse")


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / d**0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check(learner: ModuleType, group: Group, report: Report) -> None:
    q, k, v = randn(H, T, d, seed=0), randn(H, KEYS, d, seed=1), randn(H, KEYS, d, seed=2)
    cases = {}  # by name: two blocks, and their attention together
    for scale, first, name in (
        (1, 4, "two blocks of 4 keys"),
        (1, 7, "blocks of 7 keys and 1 key"),
        (1000, 4, "scores in the thousands"),
    ):
        halves = [attention(scale * q, k[:, part], v[:, part]) for part in (slice(first), slice(first, None))]
        cases[name] = (*halves[0], *halves[1]), attention(scale * q, k, v)
    full = y, lse = attention(q, k, v)
    empty = torch.zeros_like(y), torch.full_like(lse, -torch.inf)
    cases |= {"the first block is empty": ((*empty, *full), full), "the second block is empty": ((*full, *empty), full)}
    for name, (blocks, expected) in cases.items():
        report.begin(name)
        result = learner.merge(*(each.clone() for each in blocks))
        ours = result[1][0] if difference(result, expected, NAMES, math.inf) == "" else None
        title = f"lse of the queries of head 0, {name}"
        report.picture = compared(title, {"yours": numbers(ours)}, expected[1][0].tolist())
        group.expect(result, expected, name, NAMES)
