"""Check of puzzle 11: torch's attention over the whole sequence, and the numbers sent."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import messages
from puzzles.report import Report, Score
from puzzles.tensors import randn

SIZES = (2, 4)
H, d, TOKENS = 2, 4, 3
SIZE = "size in units of one rank's keys and values"
UNSCALED = "the scores are not divided by sqrt(d)"


def wrong_masks(n: int) -> dict[str, Tensor]:
    """Return which keys each query sees, (n TOKENS, n TOKENS), by what is wrong with it."""
    owner = torch.arange(n * TOKENS) // TOKENS
    past = torch.ones(n * TOKENS, n * TOKENS, dtype=torch.bool).tril()
    return {
        "no key is masked": past | True,
        "later keys of this rank are not masked": past | (owner[:, None] == owner),
        "keys of later ranks are not masked": past | (owner[:, None] != owner),
    }


def check(learner: ModuleType, group: Group, report: Report) -> None:
    group.forbid("all_reduce", "all_gather", "reduce_scatter")
    n, rank = group.size, group.rank
    for scale, name in ((1, "random numbers"), (100, "scores in the thousands")):
        report.begin(f"{name}, {TOKENS} tokens per rank")
        q, k, v = (factor * randn(H, n * TOKENS, d, seed=i) for i, factor in enumerate((scale, scale, 1)))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(n, 1)[rank]
        wrong = {kind: F.scaled_dot_product_attention(q, k, v, mask) for kind, mask in wrong_masks(n).items()}
        wrong[UNSCALED] = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        mistakes = {kind: each.chunk(n, 1)[rank] for kind, each in wrong.items()}
        own = [each.chunk(n, 1)[rank] for each in (q, k, v)]
        result, sent = group.call(learner.ring_attention, *own, group)
        unit = 2 * H * TOKENS * d
        report.picture = messages(group.gather(group.log), unit, SIZE)
        group.expect(result, expected, report.case, "attention", mistakes=mistakes)
        average = sum(group.gather(sent)) / n / unit
        # At least, rank r receives the keys and values of the r ranks before it.
        least = sum(range(n)) / n
        report.score = Score(f"sent by a rank on average, n = {n}:", average, n - 1, least, "{:.2f}")
