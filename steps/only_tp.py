"""Tensor parallelism alone: each rank computes some of the heads and of the hidden units.

torchrun --nproc_per_node 4 -m steps.only_tp
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication, llama

Operation = Callable[[Tensor], Tensor]


class Pair(torch.autograd.Function):
    """forward: one of the functions below. backward: the function that its gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation) -> Tensor:
        ctx.communicate = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicate(gradient), None, None


def copy(x: Tensor) -> Tensor:
    """Send nothing: all ranks have the same tensor."""
    return x.view_as(x)


def all_reduce(partial: Tensor) -> Tensor:
    """Sum the tensors of the ranks."""
    full = partial.clone()  # dist.all_reduce works in place, and a gradient belongs to autograd
    dist.all_reduce(full)
    return full


def parallelize(model: nn.Module) -> None:
    """Keep this rank's shards: rows of a block's first matrices, and columns of its last one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            shard = module.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
            module.weight = nn.Parameter(shard.clone())
        if isinstance(module, llama.DecoderLayer):
            # `f` and `g` of Shoeybi et al. 2019, arXiv:1909.08053
            module.enter = lambda x: Pair.apply(x, copy, all_reduce)
            module.leave = lambda x: Pair.apply(x, all_reduce, copy)


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
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and so on, from torchrun
    communication.run(train, tp=dist.get_world_size())
