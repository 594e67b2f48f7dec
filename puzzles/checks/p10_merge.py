"""Check of puzzle 10: attention to all keys at once, computed with torch's softmax."""

from types import ModuleType

import torch
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import PALE, Cell, rows
from puzzles.report import RED, Report
from puzzles.tensors import randn

H, T, d, KEYS = 2, 5, 4, 8
NAMES = ("y", "lse")


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / d**0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check(learner: ModuleType, group: Group, report: Report) -> None:
    q, k, v = randn(H, T, d, seed=0), randn(H, KEYS, d, seed=1), randn(H, KEYS, d, seed=2)
    for scale, first, name in (
        (1, 4, "two blocks of 4 keys"),
        (1, 7, "blocks of 7 keys and 1 key"),
        (1000, 4, "scores in the thousands"),
    ):
        report.begin(name)
        y, lse = attention(scale * q, k, v)
        halves = [attention(scale * q, k[:, part], v[:, part]) for part in (slice(first), slice(first, None))]
        result = learner.merge(*(each.clone() for half in halves for each in half))
        report.picture = draw(result, lse, name)
        group.expect(result, (y, lse), name, NAMES)
    y, lse = attention(q, k, v)
    empty = torch.zeros_like(y), torch.full_like(lse, -torch.inf)
    for blocks, name in (
        ((*empty, y, lse), "the first block is empty"),
        ((y, lse, *empty), "the second block is empty"),
    ):
        report.begin(name)
        result = learner.merge(*(each.clone() for each in blocks))
        report.picture = draw(result, lse, name)
        group.expect(result, (y, lse), name, NAMES)


def draw(result: object, lse: Tensor, name: str) -> str:
    ours = result[1] if isinstance(result, tuple | list) and len(result) == 2 else None
    numbers = ours[0].tolist() if isinstance(ours, Tensor) and ours.shape == lse.shape else [float("nan")] * T
    pairs = zip(numbers, lse[0].tolist(), strict=True)
    cells = [Cell(f"{a:.6g}", PALE if abs(a - b) <= 1e-9 * abs(b) else RED) for a, b in pairs]
    expected = [Cell(f"{b:.6g}", "#ffffff") for b in lse[0].tolist()]
    return rows(f"lse of the queries of head 0, {name}", [("yours", cells), ("expected", expected)])
