"""Solution of puzzle 11: the ring of Liu et al. 2023 (arXiv:2310.01889), with one block of keys in each step."""

import torch
from torch import Tensor

from puzzles.group import Group


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    rank, n = group.rank, group.size
    y, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    kv = torch.stack([k, v])
    for step in range(n):
        source = (rank - step) % n  # the rank to which these keys belong
        if step < n - 1:
            group.send(kv, (rank + 1) % n)
        if source <= rank:
            scores = q @ kv[0].mT / q.shape[-1] ** 0.5
            if source == rank:
                future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(future, -torch.inf)
            block_lse = scores.logsumexp(-1)
            new = torch.logaddexp(lse, block_lse)
            y = (lse - new).exp()[..., None] * y + (block_lse - new).exp()[..., None] * (scores.softmax(-1) @ kv[1])
            lse = new
        if step < n - 1:
            kv = group.recv((rank - 1) % n)
    return y
