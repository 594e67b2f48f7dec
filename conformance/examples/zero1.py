"""ZeRO-1 in plain torch: each rank has all weights, but Adam's moments of one slice only, which it updates.

Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from conformance import Case, Part, Result
from conformance.adapters.loop import accumulate, chunks, sum_norms, train
from conformance.case import Batch
from conformance.reference import logits_of

AXES = ("dp",)
CHAPTERS = ("step", "run", "loss", "float32")
LACKS = ("evaluation", "resume")


class Slices:
    """Parameters in one vector (N), and the slice (N/dp) of it that this rank updates.

    Args:
        parameters: parameters, which become views of the vector.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        ranks, self.rank = dist.get_world_size(), dist.get_rank()
        flat = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.whole = F.pad(flat, (0, -flat.numel() % ranks))  # so that all slices have the same size
        self.gradient = torch.zeros_like(self.whole)
        self.weight_slices = list(self.whole.view(ranks, -1))  # one for each rank, all of them views
        self.gradient_slices = list(self.gradient.view(ranks, -1))
        self.own = nn.Parameter(self.weight_slices[self.rank])  # what the optimizer sees
        self.places, start = dict[str, int](), 0
        for name, p in parameters.items():
            self.places[name], stop = start, start + p.numel()
            p.data, p.grad = self.whole[start:stop].view_as(p), self.gradient[start:stop].view_as(p)
            start = stop
        self.ends = [*self.places.values(), start][1:]

    def reduce_gradient(self) -> None:
        """Sum the ranks' gradients (N), of which each rank keeps its slice (N/dp)."""
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter(self.own.grad, self.gradient_slices)
        self.gradient.zero_()

    def gather(self) -> None:
        """Replace the weights (N) by the slices that the ranks have updated."""
        dist.all_gather(self.weight_slices, self.own.detach())

    def parts(self, own: Any) -> dict[str, Part]:
        """Return this rank's part of each tensor, given its slice of all of them."""
        first, found = self.rank * own.numel(), dict[str, Part]()
        for (name, start), end in zip(self.places.items(), self.ends, strict=True):
            a, b = max(start, first), min(end, first + own.numel())
            if a < b:
                found[name] = Part(own[a - first : b - first], (a - start,))
        return found


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model = case.model()
    named = dict(model.named_parameters())
    matrices = Slices({name: p for name, p in named.items() if p.ndim >= 2})
    others = Slices({name: p for name, p in named.items() if p.ndim < 2})
    groups = [
        {"params": [matrices.own], "weight_decay": case.weight_decay},
        {"params": [others.own], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(case.beta1, case.beta2), eps=case.eps)

    def backward(batch: Batch, total: Tensor) -> float:
        rows = chunks(batch, dist.get_world_size())[dist.get_rank()]  # (G, T) -> (G/dp, T)
        loss = accumulate(case, rows, total, lambda piece: logits_of(model, piece))
        dist.all_reduce(loss)
        matrices.reduce_gradient()
        others.reduce_gradient()
        return float(loss)

    def gather(*_: object) -> None:
        matrices.gather()
        others.gather()

    optimizer.register_step_post_hook(gather)
    result = train(case, {"matrices": matrices.own, "others": others.own}, backward, sum_norms, optimizer)
    result.gradients = [matrices.parts(g["matrices"]) | others.parts(g["others"]) for g in result.gradients]
    result.weights = named
    return result
