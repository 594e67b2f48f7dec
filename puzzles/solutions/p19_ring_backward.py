"""Solution of puzzle 19: keys and values travel around once more, and their gradients follow one step behind."""

import torch
from torch import Tensor

from puzzles.group import Group


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    rank, n, scale = group.rank, group.size, q.shape[-1] ** -0.5
    dq, kv = torch.zeros_like(q), torch.stack([k, v])
    weighted = (dout * out).sum(-1, keepdim=True)  # sum_j p_j dp_j, over the keys of all ranks
    for step in range(n):
        source = (rank - step) % n  # the rank to which these keys belong
        if step < n - 1:
            group.send(kv, (rank + 1) % n)
        dkv = torch.zeros_like(kv)
        if source <= rank:
            scores = q @ kv[0].mT * scale
            if source == rank:
                future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(future, -torch.inf)
            p = (scores - lse[..., None]).exp()
            ds = p * (dout @ kv[1].mT - weighted) * scale
            dq += ds @ kv[0]
            dkv = torch.stack([ds.mT @ q, p.mT @ dout])
        if step > 0:
            dkv += group.recv((rank - 1) % n)  # the sum of the ranks before
        group.send(dkv, (rank + 1) % n)
        if step < n - 1:
            kv = group.recv((rank - 1) % n)
    dk, dv = group.recv((rank - 1) % n)
    return dq, dk, dv
