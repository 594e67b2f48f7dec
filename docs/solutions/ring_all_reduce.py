"""docs/data_parallel.md, exercise 2: an all-reduce made of sends to the next rank."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(x: Tensor) -> None:
    """Sum a contiguous x over all n ranks, in place. Each rank sends 2 (n - 1)/n of it.

    Round one (a reduce-scatter): part i starts at rank i and collects, on its way around the ring, what every rank has
    of it; after n - 1 steps rank i - 1 has its sum. Round two (an all-gather): the sums go around once more.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = x.view(-1).tensor_split(n)
    for step in range(n - 1):
        part = parts[(rank - step - 1) % n]
        part += from_previous(parts[(rank - step) % n], part)
    for step in range(n - 1):
        part = parts[(rank - step) % n]
        part.copy_(from_previous(parts[(rank - step + 1) % n], part))


def from_previous(outgoing: Tensor, like: Tensor) -> Tensor:
    """Send to the next rank, and receive at the same time what the previous one sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(like)
    to_next = dist.P2POp(dist.isend, outgoing, (rank + 1) % n)
    from_last = dist.P2POp(dist.irecv, incoming, (rank - 1) % n)
    for work in dist.batch_isend_irecv([to_next, from_last]):
        work.wait()
    return incoming
