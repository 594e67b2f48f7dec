"""Data parallelism alone: each rank processes some sequences; all sum their gradients.

torchrun --nproc_per_node 4 -m steps.only_dp
"""

import torch
import torch.distributed as dist
from torch import nn

from steps import llama


def train() -> tuple[nn.Module, list[float]]:
    """Train. Returns the model, the same on all ranks, and the loss of each step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = llama.make_model()  # the same weights on all ranks, because all draw them with the same seed
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():
        rows = batch.chunk(size)[rank]  # (BATCH/dp, T + 1)
        loss = llama.loss_fn(model(rows[:, :-1]), rows[:, 1:])  # this rank's part of the mean over the whole batch
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # in place: now the gradient of the whole batch
        optimizer.step()  # the same update on all ranks
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets
    trained = train()
    if dist.get_rank() == 0:
        llama.print_losses(trained[1])
    dist.barrier()  # no rank ends while another one still communicates with it
    dist.destroy_process_group()
