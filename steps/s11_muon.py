"""Step 11, Muon: a matrix is updated whole, so one rank owns it, instead of a slice each.

torchrun --nproc_per_node 8 -m steps.s11_muon --dp 2 --cp 2 --tp 2
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication as comm
from steps import llama
from steps.communication import group, rank, size

EXPERTS, CHOSEN = 8, 2  # MLPs of a layer; MLPs that compute a token
MOMENTUM = 0.95  # of Muon


class Exchange(torch.autograd.Function):
    """forward: send sent[i] rows to dp rank i, receive received[i]. backward: gradients return."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received, out = sent, received, rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group["dp"])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(gradient, ctx.received, ctx.sent), None, None


class Experts(nn.Module):
    """A router that chooses two MLPs for each token (Shazeer et al. 2017, arXiv:1701.06538).

    Each dp rank holds some of the MLPs (Lepikhin et al. 2020, arXiv:2006.16668). They compute all
    tokens that are sent to them: none is dropped (Gale et al. 2022, arXiv:2211.15841).
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(llama.HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(llama.MLP() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, D)
        scores, chosen = self.router(tokens).topk(CHOSEN)  # (N, 2)
        order = chosen.flatten().argsort(stable=True)  # (2 N,): choices, sorted by expert
        counts = chosen.flatten().bincount(minlength=EXPERTS)  # rows to send
        counts = counts.view(size["dp"], -1)  # by (dp rank, its expert)
        arriving = torch.empty_like(counts)  # by (dp rank that sends them, expert of this rank)
        dist.all_to_all_single(arriving, counts, group=group["dp"])
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = Exchange.apply(tokens[order // CHOSEN], sent, received)
        experts = torch.arange(len(self.experts)).repeat(size["dp"])
        expert = experts.repeat_interleave(arriving.flatten())
        sorting, parts = expert.argsort(stable=True), arriving.sum(0).tolist()
        # An expert without rows computes, too: its gradients are 0, and its bucket waits for them.
        inputs = rows[sorting].split(parts)
        outs = [mlp(part) for mlp, part in zip(self.experts, inputs, strict=True)]
        rows = Exchange.apply(torch.cat(outs)[sorting.argsort()], received, sent)
        weights = scores.softmax(-1).flatten()[order, None]  # (2 N, 1)
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, rows * weights).view_as(x)


def make_model() -> nn.Sequential:
    """Make the model of the other steps, with experts instead of MLPs."""
    model = llama.make_model()
    for layer in model:
        if isinstance(layer, llama.DecoderLayer):
            layer.mlp = Experts()
    return model.to(llama.DTYPE)


def local_positions(cp_rank: int) -> Tensor:
    """Compute the positions of a rank's tokens, (T/cp,): two of 2 cp chunks, for equal work."""
    chunks = torch.arange(llama.LENGTH).chunk(2 * size["cp"])
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to one rank's keys after the other: q (B, H, T/cp, d), k and v (B, K, T/cp, d)."""
    kv, own = torch.stack((k, v)), local_positions(rank["cp"])
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)  # mean of v; log of weights
    for step in range(size["cp"]):
        k, v = kv.repeat_interleave(q.size(1) // kv.size(2), dim=2)  # one for each query head
        future = own[:, None] < local_positions((rank["cp"] - step) % size["cp"])
        scores = (q @ k.mT / llama.HEAD_DIM**0.5).masked_fill(future, -1e9)  # finite, to avoid NaN
        new = torch.logaddexp(lse, scores.logsumexp(-1))
        out, lse = out * (lse - new).exp()[..., None] + (scores - new[..., None]).exp() @ v, new
        if step < size["cp"] - 1:
            kv = comm.Pair.apply(kv, "cp", comm.send_to_next, comm.send_to_previous)
    return out


def parallelize(model: nn.Sequential) -> nn.Module:
    """Keep this rank's layers, experts, and shards of the matrices, rows or columns."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            own = EXPERTS // size["dp"]
            module.experts = module.experts[rank["dp"] * own : (rank["dp"] + 1) * own]
        if name.endswith("_proj"):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            shard = module.get_parameter("weight").detach().chunk(size["tp"], dim)[rank["tp"]]
            module.weight = nn.Parameter(shard.clone())
        if isinstance(module, llama.DecoderLayer):
            module.attend, module.positions = ring_attention, local_positions(rank["cp"])
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


def orthogonalise(matrix: Tensor) -> Tensor:
    """Move all singular values near 1 by five Newton-Schulz steps (Jordan 2024)."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


class Matrix:
    """A matrix that one rank of an axis owns and updates (Liu et al. 2025, arXiv:2502.16982)."""

    def __init__(self, name: str, parameter: nn.Parameter, axis: str, owner: int) -> None:
        self.parameter, self.axis, self.owner = parameter, axis, owner
        self.dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0  # split by tp
        self.momentum = torch.zeros_like(parameter) if owner == rank[axis] else None
        self.gradient = parameter.grad = torch.zeros_like(parameter)  # backward adds to it in place
        parameter.register_post_accumulate_grad_hook(self.ready)
        self.reset()

    def reset(self) -> None:
        self.gradient.zero_()
        self.pending = llama.MICRO_BATCHES

    def ready(self, parameter: Tensor) -> None:
        """Start to sum the gradient on the owner after the last micro-batch."""
        self.pending -= 1
        if self.pending == 0:
            self.work = dist.reduce(
                self.gradient, group=group[self.axis], group_dst=self.owner, async_op=True
            )

    @torch.no_grad()
    def update(self) -> None:
        """Update the matrix on its owner, a tp group whose ranks join their shards."""
        if self.momentum is None:
            return
        self.momentum.lerp_(self.gradient, 1 - MOMENTUM)
        shards = [torch.empty_like(self.momentum) for _ in range(size["tp"])]
        own = torch.lerp(self.gradient, self.momentum, MOMENTUM)
        dist.all_gather(shards, own, group=group["tp"])
        step = orthogonalise(torch.cat(shards, self.dim))
        rate = 0.2 * max(step.shape) ** 0.5 * llama.LEARNING_RATE  # as large as AdamW's
        self.parameter.sub_(rate * step.chunk(size["tp"], self.dim)[rank["tp"]])

    def gather(self) -> None:
        """Send the updated matrix from its owner to all ranks."""
        dist.broadcast(self.parameter.detach(), group=group[self.axis], group_src=self.owner)


def make_buckets(model: nn.Module) -> tuple[list[Bucket], list[Matrix]]:
    """Make buckets of parameters of a module. Muon updates the matrices of layers."""
    members: dict[str, list[nn.Parameter]] = {}
    matrices: list[Matrix] = []
    for name, parameter in model.named_parameters():
        # Same weights, different tokens. An expert has seen those of all dp ranks.
        axis = "cp" if "experts" in name else "cp_dp" if "_proj" in name else "cp_dp_tp"
        if "_proj" in name:
            matrices.append(Matrix(name, parameter, axis, len(matrices) % size[axis]))
        else:
            members.setdefault(name.split(".")[0], []).append(parameter)
    return [Bucket(parameters, "cp_dp_tp") for parameters in members.values()], matrices


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

    warmup = size["pp"] - rank["pp"] - 1  # the forwards that run before the first gradient arrives
    for ids, targets in micro_batches:
        forward(ids, targets)
        if len(running) > warmup:
            backward()
    while running:
        backward()
    for work in sent:
        work.wait()
    return total


def train(dp: int, pp: int, cp: int, tp: int) -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's part of the model, and the loss of each step."""
    comm.make_groups("dp", "pp", "cp", "tp", "cp_dp", "cp_dp_tp", dp=dp, pp=pp, cp=cp, tp=tp)
    model = parallelize(make_model())
    buckets, matrices = make_buckets(model)
    parts: list[Bucket | Matrix] = [*buckets, *matrices]
    optimizer = torch.optim.AdamW([bucket.own for bucket in buckets], llama.LEARNING_RATE)
    losses, tokens = [], local_positions(rank["cp"]).chunk(size["tp"])[rank["tp"]]  # positions
    for batch in llama.make_batches():
        rows = batch.view(size["dp"], llama.MICRO_BATCHES, -1, llama.LENGTH + 1)[rank["dp"]]
        loss = train_step(model, list(zip(rows[..., tokens], rows[..., tokens + 1], strict=True)))
        for part in parts:
            part.work.wait()
        optimizer.step()
        for matrix in matrices:
            matrix.update()
        for part in parts:
            part.gather()
            part.reset()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    comm.launch(train, "dp", "pp", "cp", "tp")
