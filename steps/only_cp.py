"""Context parallelism alone: each rank holds some tokens; keys and values go round a ring.

torchrun --nproc_per_node 4 -m steps.only_cp
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steps import communication, llama


class Shift(torch.autograd.Function):
    """forward: send a tensor some places on in a ring. backward: send its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, places: int) -> Tensor:
        ctx.places, arriving = places, torch.empty_like(tensor)
        rank, size = dist.get_rank(), dist.get_world_size()
        send = dist.P2POp(dist.isend, tensor.contiguous(), (rank + places) % size)
        receive = dist.P2POp(dist.irecv, arriving, (rank - places) % size)
        for work in dist.batch_isend_irecv([send, receive]):  # start both: not all can send first
            work.wait()
        return arriving

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Shift.apply(gradient, -ctx.places), None


def positions_of(rank: int) -> Tensor:
    """Compute the positions of a rank's tokens: (T/cp,)."""
    return torch.arange(llama.LENGTH).chunk(dist.get_world_size())[rank]


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to one rank's keys and values after the other (Liu et al. 2023, arXiv:2310.01889).

    Shapes: q and output (B, H, T/cp, d); k and v (B, K, T/cp, d).
    """
    rank, size, kv = dist.get_rank(), dist.get_world_size(), torch.stack((k, v))
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)  # mean of v; log of weights
    for step in range(size):
        k, v = kv.repeat_interleave(q.size(1) // kv.size(2), dim=2)  # one for each query head
        future = positions_of(rank)[:, None] < positions_of((rank - step) % size)
        scores = (q @ k.mT / llama.HEAD_DIM**0.5).masked_fill(future, -1e9)  # finite, to avoid NaN
        new = torch.logaddexp(lse, scores.logsumexp(-1))
        out, lse = out * (lse - new).exp()[..., None] + (scores - new[..., None]).exp() @ v, new
        if step < size - 1:
            kv = Shift.apply(kv, 1)
    return out


def train() -> tuple[nn.Module, list[float]]:
    """Train. Returns the model, the same on all ranks, and the loss of each step."""
    model, tokens = llama.make_model(), positions_of(dist.get_rank())
    for layer in model:
        if isinstance(layer, llama.DecoderLayer):
            layer.attend, layer.positions = ring_attention, tokens
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():
        loss = llama.loss_fn(model(batch[:, tokens]), batch[:, tokens + 1])
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # same weights, different tokens
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return model, losses


if __name__ == "__main__":
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and so on, from torchrun
    communication.run(train, cp=dist.get_world_size())
