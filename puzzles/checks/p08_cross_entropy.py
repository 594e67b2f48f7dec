"""Check of puzzle 8: torch's own loss of all logits, and the numbers that are sent."""

from types import ModuleType

import torch
import torch.nn.functional as F

from puzzles.group import Group
from puzzles.pictures import compared, numbers
from puzzles.report import Report, Score
from puzzles.tensors import generator, randn

SIZES = (3,)
T, V = 24, 15


def check(learner: ModuleType, group: Group, report: Report) -> None:
    n, rank = group.size, group.rank
    everywhere, sent = torch.randint(V, (T,), generator=generator(1)), 0.0
    # A constant moves all logits of a token; a random factor of 1000 also makes most probabilities 0.
    for scale, shift, targets, name in (
        (1, 0, everywhere, "logits around 0"),
        (1, 0, V // n + everywhere % (V // n), "all targets on rank 1"),
        (1, 5000, everywhere, "logits around 5000"),
        (1000, 0, everywhere, "logits of +- 1000"),
    ):
        report.begin(name)
        whole = (scale * randn(T, V, seed=0) + shift).requires_grad_()
        losses = F.cross_entropy(whole, targets, reduction="none")
        losses.sum().backward()
        assert whole.grad is not None
        result, sent = group.call(learner.cross_entropy, whole.detach().chunk(n, 1)[rank], targets, group)
        found = numbers(result[0] if isinstance(result, tuple | list) else result)
        report.picture = compared(
            f"Losses of the first tokens on rank 0, {name}", {"yours": found[:8]}, losses[:8].tolist()
        )
        group.expect(result, (losses, whole.grad.chunk(n, 1)[rank]), name, ("losses", "gradient"))
    par = 3 * 2 * (n - 1) / n
    # The log-sum-exp as an all-reduce made of messages; then each target's logit reaches n - 1 ranks, and all ranks
    # send equally many of them.
    best = 3 * (n - 1) / n
    busiest = max(group.gather(sent)) / T
    report.score = Score("numbers sent per token:", busiest, par, best, "{:.2f}")
