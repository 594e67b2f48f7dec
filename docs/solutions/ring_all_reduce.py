"""Solution to exercise 2 of docs/data_parallel.md: an all-reduce made of sends to the next rank."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(x: Tensor) -> None:
    """Sum a contiguous x over all n ranks, in place. Each rank sends 2 (n - 1)/n of it.

    First round (a reduce-scatter): chunk i starts at rank i and travels around the ring, and every rank adds its own
    chunk i. So after n - 1 steps rank i - 1 has the sum. Second round (an all-gather): the sums travel around the ring.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.view(-1).tensor_split(n)
    for step in range(n - 1):
        chunk = chunks[(rank - step - 1) % n]
        chunk += send_and_receive(chunks[(rank - step) % n], like=chunk)
    for step in range(n - 1):
        chunk = chunks[(rank - step) % n]
        chunk.copy_(send_and_receive(chunks[(rank - step + 1) % n], like=chunk))


def send_and_receive(outgoing: Tensor, like: Tensor) -> Tensor:
    """Send a tensor to the next rank, and return the one from the previous rank, which has the shape of `like`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(like)
    to_next = dist.P2POp(dist.isend, outgoing, (rank + 1) % n)
    from_previous = dist.P2POp(dist.irecv, incoming, (rank - 1) % n)
    for work in dist.batch_isend_irecv([to_next, from_previous]):
        work.wait()
    return incoming
