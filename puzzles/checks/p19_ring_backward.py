"""Check of puzzle 19: gradients of torch's attention over the whole sequence, and the numbers sent."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.checks.p11_ring_attention import SIZE, TOKENS, UNSCALED, H, d, wrong_masks
from puzzles.group import Group
from puzzles.pictures import messages
from puzzles.report import Report, Score
from puzzles.tensors import randn

SIZES = (2, 4)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dout: Tensor, seen: Tensor, weighted: Tensor, scale: float = d**-0.5
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv over the whole sequence, from the sums `weighted` over p dp."""
    p = (q @ k.mT * d**-0.5 - lse[..., None]).exp().masked_fill(~seen, 0)
    ds = p * (dout @ v.mT - weighted) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


def check(learner: ModuleType, group: Group, report: Report) -> None:
    group.forbid("all_reduce", "all_gather", "reduce_scatter")
    n, rank = group.size, group.rank
    for scale, name in ((1, "random numbers"), (30, "scores in the thousands")):
        report.begin(f"{name}, {TOKENS} tokens per rank")
        q, k, v, dout = (factor * randn(H, n * TOKENS, d, seed=i) for i, factor in enumerate((scale, scale, 1, 1)))
        whole = [each.requires_grad_() for each in (q, k, v)]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.ones(n * TOKENS, n * TOKENS, dtype=torch.bool).triu(1)
        lse = (q @ k.mT / d**0.5).masked_fill(future, -torch.inf).logsumexp(-1)
        expected = torch.autograd.grad(out, whole, dout)
        own = [each.detach().chunk(n, 1)[rank] for each in (q, k, v, out, lse, dout)]
        result, sent = group.call(learner.ring_backward, *own, group)
        unit = 2 * H * TOKENS * d
        report.picture = messages(group.gather(group.log), unit, SIZE)
        weighted = (dout * out).sum(-1, keepdim=True)
        wrong = {kind: gradients(q, k, v, lse, dout, mask, weighted) for kind, mask in wrong_masks(n).items()}
        wrong["the gradient of the scores lacks the sum over p dp"] = gradients(
            q, k, v, lse, dout, ~future, 0 * weighted
        )
        wrong[UNSCALED] = gradients(q, k, v, lse, dout, ~future, weighted, 1.0)
        mistakes = {kind: [each.chunk(n, 1)[rank] for each in three] for kind, three in wrong.items()}
        mine = tuple(each.chunk(n, 1)[rank] for each in expected)
        group.expect(result, mine, report.case, ("dq", "dk", "dv"), mistakes=mistakes)
        average = sum(group.gather(sent)) / n / unit
        # A query needs d numbers, its output's gradient too, and two sums; its own gradient comes back from every rank.
        best = sum(range(n)) / n * (3 * d + 2) / (2 * d)
        report.score = Score(f"sent by a rank on average, n = {n}:", average, 2 * n - 1, best, "{:.2f}")
