"""Ring attention in plain torch: each rank has some tokens of every row, and keys and values travel around a ring.

Liu et al. 2023, arXiv:2310.01889.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from conformance import Case, Result
from conformance.adapters.loop import accumulate, chunks, train
from conformance.case import Batch

AXES = ("cp",)
CHAPTERS = ("step", "run", "loss", "float32")
LACKS = ("documents", "evaluation", "resume")


def shift(x: Tensor, by: int) -> Tensor:
    """Send a tensor `by` ranks further around the ring, and return the one that arrives."""
    rank, ranks, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    sending: Any = dist.isend(x.contiguous(), (rank + by) % ranks)
    dist.recv(arrived, (rank - by) % ranks)
    sending.wait()
    return arrived


class Shift(torch.autograd.Function):
    """forward: send to the next rank, receive from the previous one. backward: the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return shift(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return shift(gradient, -1)


def ring_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Compute causal attention of this rank's queries to the keys of all ranks, as transformers' layers call it.

    Args:
        q: queries (B, H, T/cp, head_dim).
        k, v: keys and values (B, H_kv, T/cp, head_dim).

    Returns:
        The attention's output (B, T/cp, H, head_dim).
    """
    rank, ranks, tokens = dist.get_rank(), dist.get_world_size(), q.size(2)
    kv = torch.stack([k, v]).repeat_interleave(q.size(1) // k.size(1), 2)
    out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -math.inf)
    for i in range(ranks):
        source = (rank - i) % ranks  # the rank whose keys and values are here now
        ahead = torch.arange(tokens)[None] + (source - rank) * tokens > torch.arange(tokens)[:, None]
        # Not -inf: every rank computes every block, so that every Shift has a backward, also that of an unseen block.
        scores = (q @ kv[0].mT * options["scaling"]).masked_fill(ahead, torch.finfo(q.dtype).min)
        block_lse = scores.logsumexp(-1, keepdim=True)
        new = torch.logaddexp(lse, block_lse)
        out = out * (lse - new).exp() + (scores - new).exp() @ kv[1]
        lse = new
        kv = Shift.apply(kv) if i < ranks - 1 else kv
    return out.transpose(1, 2), None


AttentionInterface.register("ring", ring_attention)


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model = case.model()
    model.set_attn_implementation("ring")

    def logits_of(piece: Batch) -> Tensor:
        logits: Tensor = model(input_ids=piece["input_ids"], position_ids=piece["position_ids"], use_cache=False).logits
        return logits

    def backward(batch: Batch, total: Tensor) -> float:
        tokens = chunks(batch, dist.get_world_size(), 1)[dist.get_rank()]  # (G, T) -> (G, T/cp)
        loss = accumulate(case, tokens, total, logits_of)
        dist.all_reduce(loss)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        return float(loss)

    return train(case, dict(model.named_parameters()), backward)
