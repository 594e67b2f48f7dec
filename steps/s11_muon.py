"""Step 11, Muon: a matrix is updated whole, so one rank owns it, instead of a slice each.

torchrun --nproc_per_node 8 -m steps.s11_muon --dp 2 --cp 2 --tp 2
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication as comm
from steps import llama
from steps.communication import group, rank, size
from steps.s9_cp import Bucket, local_positions, train_step
from steps.s10_ep import make_model, parallelize

MOMENTUM = 0.95  # of Muon


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
