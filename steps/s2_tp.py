"""Step 2, tensor parallelism: each rank computes some of the heads and of the hidden units.

torchrun --nproc_per_node 2 -m steps.s2_tp --tp 2
"""

import torch
from torch import Tensor, nn

from steps import communication as comm
from steps import llama
from steps.communication import rank, size


def parallelize(model: nn.Sequential) -> nn.Module:
    """Keep this rank's shards: rows of a block's first matrices, and columns of its last one."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            shard = module.get_parameter("weight").detach().chunk(size["tp"], dim)[rank["tp"]]
            module.weight = nn.Parameter(shard.clone())
        if isinstance(module, llama.DecoderLayer):
            module.enter = lambda x: comm.Pair.apply(x, "tp", comm.copy, comm.all_reduce)
            module.leave = lambda x: comm.Pair.apply(x, "tp", comm.all_reduce, comm.copy)
    return model


def train_step(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradients of all (ids, targets), (B, T) each. Returns their part of the loss."""
    total = torch.zeros((), dtype=llama.DTYPE)
    for ids, targets in micro_batches:
        loss = llama.loss_fn(model(ids), targets)
        loss.backward()
        total += loss.detach()
    return total


def train(tp: int) -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's shards of the model, and the loss of each step."""
    comm.make_groups("tp", tp=tp)
    model = parallelize(llama.make_model())
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():
        rows = batch.view(llama.MICRO_BATCHES, -1, llama.LENGTH + 1)  # (micro-batch, B, T + 1)
        loss = train_step(model, list(zip(rows[..., :-1], rows[..., 1:], strict=True)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    comm.launch(train, "tp")
