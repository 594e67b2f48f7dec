"""Solution of puzzle 20."""

from collections.abc import Callable

import torch
from torch import Tensor

from puzzles.group import Group


def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, run: Callable[[int, Tensor], Tensor], experts: int, group: Group
) -> Tensor:
    own, ranks = experts // group.size, range(group.size)
    pairs = {e: (chosen == e).nonzero(as_tuple=True) for e in range(experts)}  # tokens that chose e, and their places
    others = [rank for rank in ranks if rank != group.rank]
    for rank in others:
        for e in range(rank * own, (rank + 1) * own):
            group.send(x[pairs[e][0]], rank)
    outputs = {}
    for e in range(group.rank * own, (group.rank + 1) * own):
        rows = [x[pairs[e][0]] if rank == group.rank else group.recv(rank) for rank in ranks]
        parts = run(e, torch.cat(rows)).split([len(each) for each in rows])  # one product for the rows of all ranks
        outputs[e] = parts[group.rank]
        for rank in others:
            group.send(parts[rank], rank)
    for rank in others:
        for e in range(rank * own, (rank + 1) * own):
            outputs[e] = group.recv(rank)
    y = torch.zeros_like(x)
    for e, (tokens, places) in pairs.items():
        y = y.index_add(0, tokens, outputs[e] * weights[tokens, places, None])
    return y
