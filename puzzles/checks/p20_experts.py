"""Check of puzzle 20: all experts on one process, and the numbers sent."""

from types import ModuleType

import torch
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import messages
from puzzles.report import Misuse, Report
from puzzles.tensors import randn

SIZES = (2, 4)
N, D, K, EXPERTS = 5, 3, 2, 8
CHOICES = {  # of each token's first expert, by the number of the token among those of all ranks
    "tokens that stay on their rank": lambda i, n: i // N * EXPERTS // n,
    "tokens for experts of all ranks": lambda i, n: 3 * i % EXPERTS,
    "all tokens for two experts": lambda i, n: 5,
}


def check(learner: ModuleType, group: Group, report: Report) -> None:
    group.forbid("all_reduce", "all_gather", "reduce_scatter")
    n, rank = group.size, group.rank
    own = EXPERTS // n
    matrices = [randn(D, D, seed=e) for e in range(EXPERTS)]

    def run(e: int, x: Tensor) -> Tensor:
        if e not in range(rank * own, (rank + 1) * own):
            raise Misuse(f"rank {rank} has experts {rank * own} to {(rank + 1) * own - 1}, not {e}")
        return x @ matrices[e]

    for case, first in CHOICES.items():
        report.begin(f"{n} ranks, {case}")
        x, weights = randn(n * N, D, seed=50), randn(n * N, K, seed=51).softmax(-1)
        one = torch.tensor([first(i, n) for i in range(n * N)])
        chosen = torch.stack((one, one ^ 1), 1)  # a token's second expert is its first one's neighbour
        chosen = chosen if "stay" in case else chosen.flip(1)  # in no order
        outputs = torch.stack([x @ each for each in matrices])  # (E, n N, D)
        places = torch.arange(n * N)
        expected = torch.stack([outputs[chosen[:, k], places] * weights[:, k, None] for k in range(K)]).sum(0)
        tokens = slice(rank * N, (rank + 1) * N)
        own_tokens = x[tokens], chosen[tokens], weights[tokens]
        result, sent = group.call(learner.mixture, *own_tokens, run, EXPERTS, group)
        report.picture = messages(group.gather(group.log), D, "rows")
        group.expect(result, expected[tokens], report.case, "y")
        away = chosen // own != (places // N)[:, None]  # pairs of a token and an expert on another rank
        here = chosen // own == rank
        due = D * (away[tokens].sum() + (away & here).sum()).item()
        sentence = f"{group.here}{report.case}: {sent:g} numbers are sent; rows of {due}, and {EXPERTS} others, suffice"
        group.require(sent <= due + EXPERTS, sentence)
