"""Step 9 with clipping: a norm of all gradients above a limit scales them down.

torchrun --nproc_per_node 8 -m steps.clip --pp 2 --cp 2 --tp 2
"""

import torch
import torch.distributed as dist
from torch import nn

from steps import communication as comm
from steps import llama
from steps.communication import rank, size
from steps.s9_cp import Bucket, local_positions, make_buckets, parallelize, train_step

MAX_NORM = 1.0


def clip_grad_norm(buckets: list[Bucket]) -> None:
    """Scale all gradients by one factor, so that their norm over all ranks is at most MAX_NORM."""
    own = [bucket.gradient_slices[rank[bucket.axis]] for bucket in buckets]
    square = torch.stack([gradient.square().sum() for gradient in own]).sum()
    dist.all_reduce(square)  # over all axes: each number has one owner, and counts once
    factor = (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)  # like clip_grad_norm_ of torch
    for gradient in own:
        gradient.mul_(factor)


def train(dp: int, pp: int, cp: int, tp: int) -> tuple[nn.Module, list[float]]:
    """Train. Returns this rank's part of the model, and the loss of each step."""
    comm.make_groups("dp", "pp", "cp", "tp", "cp_dp", "cp_dp_tp", dp=dp, pp=pp, cp=cp, tp=tp)
    model = parallelize(llama.make_model())
    buckets = make_buckets(model)
    optimizer = torch.optim.AdamW([bucket.own for bucket in buckets], llama.LEARNING_RATE)
    losses, tokens = [], local_positions(rank["cp"]).chunk(size["tp"])[rank["tp"]]  # positions
    for batch in llama.make_batches():
        rows = batch.view(size["dp"], llama.MICRO_BATCHES, -1, llama.LENGTH + 1)[rank["dp"]]
        loss = train_step(model, list(zip(rows[..., tokens], rows[..., tokens + 1], strict=True)))
        for bucket in buckets:
            bucket.work.wait()
        clip_grad_norm(buckets)
        optimizer.step()
        for bucket in buckets:
            bucket.gather()
            bucket.reset()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    comm.launch(train, "dp", "pp", "cp", "tp")
