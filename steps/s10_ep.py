"""Step 10, expert parallelism: each dp rank holds some MLPs; a router sends tokens to two of all.

torchrun --nproc_per_node 8 -m steps.s10_ep --dp 2 --cp 2 --tp 2
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication as comm
from steps import llama, s9_cp
from steps.communication import group, rank, size
from steps.s9_cp import Bucket, local_positions, train_step

EXPERTS, CHOSEN = 8, 2  # MLPs of a layer; MLPs that compute a token


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


def parallelize(model: nn.Sequential) -> nn.Module:
    """Keep this rank's experts, and of these, as of all else, what step 9 keeps."""
    own = EXPERTS // size["dp"]
    for module in model.modules():
        if isinstance(module, Experts):
            module.experts = module.experts[rank["dp"] * own : (rank["dp"] + 1) * own]
    return s9_cp.parallelize(model)


def make_buckets(model: nn.Module) -> list[Bucket]:
    """Make buckets of the parameters that are in the same module and have the same axis."""
    members: dict[tuple[str, str], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        # Same weights, different tokens. An expert has seen those of all dp ranks.
        axis = "cp" if "experts" in name else "cp_dp" if "_proj" in name else "cp_dp_tp"
        members.setdefault((name.split(".")[0], axis), []).append(parameter)
    return [Bucket(parameters, axis) for (_, axis), parameters in members.items()]


def train(dp: int, pp: int, cp: int, tp: int) -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's part of the model, and the loss of each step."""
    comm.make_groups("dp", "pp", "cp", "tp", "cp_dp", "cp_dp_tp", dp=dp, pp=pp, cp=cp, tp=tp)
    model = parallelize(make_model())
    buckets = make_buckets(model)
    optimizer = torch.optim.AdamW([bucket.own for bucket in buckets], llama.LEARNING_RATE)
    losses, tokens = [], local_positions(rank["cp"]).chunk(size["tp"])[rank["tp"]]  # positions
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
    comm.launch(train, "dp", "pp", "cp", "tp")
