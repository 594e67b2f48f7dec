"""Step 4, data parallelism: each dp rank processes some sequences; all sum their gradients.

torchrun --nproc_per_node 4 -m steps.s4_dp --dp 2 --tp 2
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication as comm
from steps import llama
from steps.communication import group, rank, size


def parallelize(model: nn.Sequential) -> nn.Module:
    """Keep this rank's shards: rows of a block's first matrices, and columns of its last one."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            shard = module.get_parameter("weight").detach().chunk(size["tp"], dim)[rank["tp"]]
            module.weight = nn.Parameter(shard.clone())
        if isinstance(module, llama.DecoderLayer):
            module.enter = lambda x: comm.Pair.apply(x, "tp", comm.all_gather, comm.reduce_scatter)
            module.leave = lambda x: comm.Pair.apply(x, "tp", comm.reduce_scatter, comm.all_gather)
    return model


def train_step(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradients of all (ids, targets), (B, T) each. Returns their part of the loss."""
    total = torch.zeros((), dtype=llama.DTYPE)
    for ids, targets in micro_batches:
        loss = llama.loss_fn(model(ids), targets)
        loss.backward()
        total += loss.detach()
    for name, parameter in model.named_parameters():
        axis = "dp" if "_proj" in name else "dp_tp"  # same weights, different tokens
        dist.all_reduce(parameter.grad, group=group[axis])
    return total


def train(dp: int, tp: int) -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's shards of the model, and the loss of each step."""
    comm.make_groups("dp", "tp", "dp_tp", dp=dp, tp=tp)
    model = parallelize(llama.make_model())
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses, tokens = [], torch.arange(llama.LENGTH).chunk(size["tp"])[rank["tp"]]  # positions
    for batch in llama.make_batches():
        rows = batch.view(size["dp"], llama.MICRO_BATCHES, -1, llama.LENGTH + 1)[rank["dp"]]
        loss = train_step(model, list(zip(rows[..., tokens], rows[..., tokens + 1], strict=True)))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    comm.launch(train, "dp", "tp")
