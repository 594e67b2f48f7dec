"""Solution of puzzle 2."""

import torch
from torch import Tensor

from puzzles.group import Group


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    rank, n = group.rank, group.size
    after, before = (rank + 1) % n, (rank - 1) % n
    chunks = list(x.tensor_split(n))
    # Reduce-scatter: chunk i starts on rank i, and each rank adds its own chunk i. Rank i - 1 ends with the sum.
    for step in range(n - 1):
        group.send(chunks[(rank - step) % n], after)
        chunks[(rank - step - 1) % n] = chunks[(rank - step - 1) % n] + group.recv(before)
    # All-gather: the sums travel around the ring.
    for step in range(n - 1):
        group.send(chunks[(rank - step + 1) % n], after)
        chunks[(rank - step) % n] = group.recv(before)
    return torch.cat(chunks)
