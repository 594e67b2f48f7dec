"""Communication of context-parallel ranks: a ring, in which tensors travel to the next rank while the ranks compute.

    cp rank 0 -> cp rank 1 -> cp rank 2 -> cp rank 3 -> cp rank 0

After i steps, a rank has the tensor of the rank i places before it.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm


def start_ring_step(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to send `tensor` to the next cp rank, and to receive a tensor of its shape from the previous one.

    Returns:
        A function that waits for both messages and returns the received tensor. Until then, `tensor` must not change.
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
        while handles:  # each handle keeps its tensor in memory
            handles.pop().wait()
        return results.pop()

    return finish


def ring(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (cp rank, its `tensor`) for all cp ranks, this rank's own first.

    The next tensor arrives while the caller uses the current one. A caller that deletes each tensor after use never has
    more than two of them in memory.
    """
    grid = pgm.process_group_manager
    for step in range(grid.cp_world_size - 1):
        receive = start_ring_step(tensor)
        yield (grid.cp_rank - step) % grid.cp_world_size, tensor
        tensor = receive()
    yield (grid.cp_rank + 1) % grid.cp_world_size, tensor  # cp - 1 steps back is one step ahead
