"""The ring: what travels from each context-parallel rank to the next one, while the ranks compute.

rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0        After i steps a rank has what was i ranks before it.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm


def start_ring_step(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to send `tensor` to the next rank, and to receive as much from the previous one.

    Returns:
        A function that waits for both, and returns what was received. Until then `tensor` must not change.
    """
    grid = pgm.process_group_manager
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    messages = [
        dist.P2POp(dist.isend, tensor.contiguous(), grid.cp_send_rank, grid.cp_group),
        dist.P2POp(dist.irecv, received, grid.cp_recv_rank, grid.cp_group),
    ]
    handles = dist.batch_isend_irecv(messages)
    results = [received]
    del messages, received

    def finish() -> Tensor:
        while handles:  # each keeps its tensor in memory
            handles.pop().wait()
        return results.pop()

    return finish


def ring(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each rank's `tensor`, beginning with this rank's own, and which rank it is from.

    The next one arrives while the caller works with this one. A caller that deletes what it is done with never has more
    than two in memory.
    """
    grid = pgm.process_group_manager
    for step in range(grid.cp_world_size - 1):
        receive = start_ring_step(tensor)
        yield (grid.cp_rank - step) % grid.cp_world_size, tensor
        tensor = receive()
    yield (grid.cp_rank + 1) % grid.cp_world_size, tensor
