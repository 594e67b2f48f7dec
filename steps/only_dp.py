"""Data parallelism alone: each rank processes some sequences; all sum their gradients.

torchrun --nproc_per_node 4 -m steps.only_dp
"""

import torch
import torch.distributed as dist
from torch import nn

from steps import communication, llama
from steps.s1_one_process import train_step


def train() -> tuple[nn.Module, list[float]]:
    """Train. Returns the model and the loss of each step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = llama.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():
        rows = batch.view(size, llama.MICRO_BATCHES, -1, llama.LENGTH + 1)[rank]
        loss = train_step(model, list(zip(rows[..., :-1], rows[..., 1:], strict=True)))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # in place: now the gradient of the whole batch
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and so on, from torchrun
    communication.run(train, dp=dist.get_world_size())
