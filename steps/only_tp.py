"""Tensor parallelism alone: each rank computes some of the heads and of the hidden units.

torchrun --nproc_per_node 4 -m steps.only_tp
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication, llama


class Copy(torch.autograd.Function):
    """forward: identity. backward: sum over the ranks (`f` of Shoeybi et al. 2019, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()  # all_reduce works in place, and the gradient belongs to autograd
        dist.all_reduce(total)
        return total


class Sum(torch.autograd.Function):
    """forward: sum over the ranks. backward: identity (`g` of the same paper)."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def parallelize(model: nn.Module) -> None:
    """Keep this rank's shards: rows of the first matrices of attention and MLP, and columns of the last ones."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            shard = module.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
            module.weight = nn.Parameter(shard.clone())
        if isinstance(module, llama.DecoderLayer):
            module.enter, module.leave = Copy.apply, Sum.apply


def train() -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's shards of the model, and the loss of each step."""
    model = llama.make_model()
    parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():  # all ranks process all tokens
        loss = llama.loss_fn(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets
    communication.check_sizes(tp=dist.get_world_size())
    trained = train()
    if dist.get_rank() == 0:
        llama.print_losses(trained[1])
    dist.barrier()  # no rank ends while another one still communicates with it
    dist.destroy_process_group()
