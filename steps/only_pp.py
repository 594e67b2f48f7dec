"""Pipeline parallelism alone: each rank holds some layers, and passes on micro-batches (1F1B).

torchrun --nproc_per_node 4 -m steps.only_pp
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication, llama


def receive(shape: Sequence[int], source: int) -> Tensor:
    """Wait for a tensor of this shape from a rank. The receiver allocates it."""
    tensor = torch.empty(*shape, dtype=llama.DTYPE)
    dist.recv(tensor, source)
    return tensor


def train_step(stage: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradients of all (ids, targets), (B, T) each. Returns the loss, or 0."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total, running = torch.zeros((), dtype=llama.DTYPE), deque[tuple[Tensor, Tensor]]()
    sent: list[Any] = []

    def forward(ids: Tensor, targets: Tensor) -> None:
        shape = (*ids.shape, llama.HIDDEN)
        x = ids if rank == 0 else receive(shape, rank - 1).requires_grad_()  # a leaf: gets x.grad
        y = llama.loss_fn(stage(x), targets) if rank == last else stage(x)
        if rank == last:
            total.add_(y.detach())
        else:
            sent.append(dist.isend(y.detach(), rank + 1))  # the next rank has a graph of its own
        running.append((x, y))

    def backward() -> None:
        x, y = running.popleft()
        y.backward(None if rank == last else receive(y.shape, rank + 1))  # continues with dy
        if x.grad is not None:  # not on rank 0, whose x are token ids
            sent.append(dist.isend(x.grad, rank - 1))

    for ids, targets in micro_batches:  # 1F1B (Narayanan et al. 2020, arXiv:2006.09503)
        forward(ids, targets)
        if len(running) > last - rank:  # the forwards that run before the first gradient arrives
            backward()
    while running:
        backward()
    for work in sent:
        work.wait()
    return total


def train() -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's layers, and the loss of each step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = llama.make_model()
    cuts = [1 + llama.LAYERS * stage // size for stage in range(1, size)]  # module 0: embedding
    stage = model[[0, *cuts][rank] : [*cuts, len(model)][rank]]
    optimizer = torch.optim.AdamW(stage.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():
        rows = batch.chunk(llama.MICRO_BATCHES)  # (B, T + 1) each
        loss = train_step(stage, [(ids[:, :-1], ids[:, 1:]) for ids in rows])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # only the last rank has one
        losses.append(loss.item())
    return stage, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and so on, from torchrun
    communication.run(train, pp=dist.get_world_size())
