"""Step 7, pipeline parallelism: each pp rank holds some layers, and passes on micro-batches.

torchrun --nproc_per_node 4 -m steps.s7_pp --pp 4
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication as comm
from steps import llama
from steps.communication import group, rank, size


def parallelize(model: nn.Sequential) -> nn.Module:
    """Keep this rank's layers, and its shards of their matrices, rows or columns."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            shard = module.get_parameter("weight").detach().chunk(size["tp"], dim)[rank["tp"]]
            module.weight = nn.Parameter(shard.clone())
        if isinstance(module, llama.DecoderLayer):
            module.enter = lambda x: comm.Pair.apply(x, "tp", comm.all_gather, comm.reduce_scatter)
            module.leave = lambda x: comm.Pair.apply(x, "tp", comm.reduce_scatter, comm.all_gather)
    cuts = [1 + llama.LAYERS * stage // size["pp"] for stage in range(1, size["pp"])]
    return model[[0, *cuts][rank["pp"]] : [*cuts, len(model)][rank["pp"]]]  # module 0: embedding


class Bucket:
    """Parameters and gradients, views of two flat buffers. Each rank owns a slice of both."""

    def __init__(self, parameters: list[nn.Parameter], axis: str) -> None:
        self.axis, self.parameters = axis, parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.gradients = torch.zeros(sum(sizes), dtype=llama.DTYPE)
        self.weights = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.weights, parameters)  # now they are views of it
        for parameter, gradient in zip(parameters, self.gradients.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)  # backward adds to it in place
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.gradient_slices = list(self.gradients.view(size[axis], -1))  # one for each rank
        self.weight_slices = list(self.weights.view(size[axis], -1))
        self.own = nn.Parameter(self.weight_slices[rank[axis]])  # what the optimizer sees
        self.own.grad = self.gradient_slices[rank[axis]]
        self.reset()

    def reset(self) -> None:
        self.gradients.zero_()
        self.pending = len(self.parameters) * llama.MICRO_BATCHES

    def ready(self, parameter: Tensor) -> None:
        """Start to sum this rank's slice after the last gradient of the last micro-batch."""
        self.pending -= 1
        if self.pending == 0:
            self.work = dist.reduce_scatter(
                self.own.grad, self.gradient_slices, group=group[self.axis], async_op=True
            )

    def gather(self) -> None:
        """Send the updated weights of each slice to all ranks."""
        dist.all_gather(self.weight_slices, self.own.detach(), group=group[self.axis])


def make_buckets(model: nn.Module) -> list[Bucket]:
    """Make buckets of the parameters that are in the same module and have the same axis."""
    members: dict[tuple[str, str], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        axis = "dp" if "_proj" in name else "dp_tp"  # same weights, different tokens
        members.setdefault((name.split(".")[0], axis), []).append(parameter)
    return [Bucket(parameters, axis) for (_, axis), parameters in members.items()]


def train_step(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradients of all (ids, targets), (B, T) each. Returns their part of the loss."""
    total, running, sent = torch.zeros((), dtype=llama.DTYPE), deque[tuple[Tensor, Tensor]](), []
    first, last = rank["pp"] == 0, rank["pp"] == size["pp"] - 1

    def forward(ids: Tensor, targets: Tensor) -> None:
        x = ids if first else comm.receive((*ids.shape, llama.HIDDEN), "pp", -1).requires_grad_()
        y = llama.loss_fn(model(x), targets) if last else model(x)
        if last:
            total.add_(y.detach())
        else:
            sent.append(comm.send(y.detach(), "pp", 1))
        running.append((x, y))

    def backward() -> None:
        x, y = running.popleft()
        y.backward(None if last else comm.receive(y.shape, "pp", 1))
        if x.grad is not None:  # not on the first stage, whose x are token ids
            sent.append(comm.send(x.grad, "pp", -1))

    for ids, targets in micro_batches:
        forward(ids, targets)
    while running:
        backward()
    for work in sent:
        work.wait()
    return total


def train(dp: int, pp: int, tp: int) -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's part of the model, and the loss of each step."""
    comm.make_groups("dp", "pp", "tp", "dp_tp", dp=dp, pp=pp, tp=tp)
    model = parallelize(llama.make_model())
    buckets = make_buckets(model)
    optimizer = torch.optim.AdamW([bucket.own for bucket in buckets], llama.LEARNING_RATE)
    losses, tokens = [], torch.arange(llama.LENGTH).chunk(size["tp"])[rank["tp"]]  # positions
    for batch in llama.make_batches():
        rows = batch.view(size["dp"], llama.MICRO_BATCHES, -1, llama.LENGTH + 1)[rank["dp"]]
        loss = train_step(model, list(zip(rows[..., tokens], rows[..., tokens + 1], strict=True)))
        for bucket in buckets:
            bucket.work.wait()
        optimizer.step()
        for bucket in buckets:
            bucket.gather()
            bucket.reset()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    comm.launch(train, "dp", "pp", "tp")
