"""Communication, which steps 2 to 11 use unchanged: groups of ranks; functions of (tensor, axis).

No function works in place. Sizes and indices are in `size[axis]` and `rank[axis]`.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported by AdamW, after `init_process_group`, it would keep a group alive
from torch import Tensor, nn

from steps import llama

Operation = Callable[..., Tensor]  # of (tensor, axis)
group: dict[str, Any] = {}  # for each axis, this rank's group,
size: dict[str, int] = {}  # the number of its members,
rank: dict[str, int] = {}  # and this rank's index among them

# Sizes that work, in any combination: each rank gets sequences, layers, tokens and heads.
SIZES = {"dp": [1, 2, 4], "pp": [1, 2, 3, 4, 5], "cp": [1, 2, 4], "tp": [1, 2, 4]}


def check_sizes(**sizes: int) -> None:
    """End the program with a sentence, unless all sizes work and fit the number of processes."""
    ranks, processes = math.prod(sizes.values()), dist.get_world_size()
    bad = {axis: n for axis, n in sizes.items() if n not in SIZES[axis]}
    wrong = [f"{axis} {n} does not work; use one of {SIZES[axis]}" for axis, n in bad.items()]
    if ranks != processes and not wrong:
        wrong = [f"the sizes {sizes} need --nproc_per_node {ranks}, not {processes}"]
    if wrong and dist.get_rank() == 0:
        print("\n".join(wrong))
    if wrong:
        raise SystemExit  # with status 0, because torchrun adds a page of its own to any other


def make_groups(*axes: str, **sizes: int) -> None:
    """Number the ranks like elements of an array with these sizes; make the groups of each axis.

    The members of a group differ in the dimensions that the axis names ("tp", "cp_dp") only.
    """
    grid = torch.arange(dist.get_world_size()).view(*sizes.values())
    for axis in axes:
        dims = [dim for dim, name in enumerate(sizes) if name in axis.split("_")]
        others = [dim for dim in range(len(sizes)) if dim not in dims]
        members = math.prod(grid.shape[dim] for dim in dims)
        rows = grid.permute(*others, *dims).reshape(-1, members).tolist()  # a row for each group
        group[axis], _ = dist.new_subgroups_by_enumeration(rows)
        size[axis], rank[axis] = dist.get_world_size(group[axis]), dist.get_rank(group[axis])


class Pair(torch.autograd.Function):
    """forward: one of the functions below. backward: the function that its gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, forward: Operation, backward: Operation) -> Tensor:
        ctx.axis, ctx.communicate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.communicate(gradient, ctx.axis), None, None, None


def copy(x: Tensor, axis: str) -> Tensor:
    """Send nothing: all ranks have the same tensor."""
    return x.view_as(x)


def all_reduce(partial: Tensor, axis: str) -> Tensor:
    """Sum the tensors of the ranks."""
    full = partial.clone()
    dist.all_reduce(full, group=group[axis])
    return full


def all_gather(shard: Tensor, axis: str) -> Tensor:
    """Join the ranks' shards of the sequence: (B, T/n, D) on each of n ranks -> (B, T, D)."""
    shards = [torch.empty_like(shard) for _ in range(size[axis])]
    dist.all_gather(shards, shard.contiguous(), group=group[axis])
    return torch.cat(shards, dim=1)


def reduce_scatter(partial: Tensor, axis: str) -> Tensor:
    """Sum the tensors; keep this rank's shard of the sequence: (B, T, D) -> (B, T/n, D)."""
    shards = [shard.contiguous() for shard in partial.chunk(size[axis], dim=1)]
    own = torch.empty_like(shards[0])
    dist.reduce_scatter(own, shards, group=group[axis])
    return own


def send(tensor: Tensor, axis: str, places: int) -> dist.Work:
    """Start to send a tensor to the rank some places on, in a ring. Returns what to wait for."""
    to = (rank[axis] + places) % size[axis]
    work = dist.isend(tensor.contiguous(), group=group[axis], group_dst=to)
    assert work is not None
    return work


def receive(shape: Sequence[int], axis: str, places: int) -> Tensor:
    """Wait for a tensor of this shape from the rank some places on, in a ring."""
    tensor, source = torch.empty(*shape, dtype=llama.DTYPE), (rank[axis] + places) % size[axis]
    dist.recv(tensor, group=group[axis], group_src=source)
    return tensor


def send_to_next(tensor: Tensor, axis: str, places: int = 1) -> Tensor:
    """Send a tensor to the next rank of a ring, and return the one from the previous rank."""
    work = send(tensor, axis, places)
    received = receive(tensor.shape, axis, -places)
    work.wait()
    return received


def send_to_previous(tensor: Tensor, axis: str) -> Tensor:
    """Send a tensor to the previous rank of a ring, and return the one from the next rank."""
    return send_to_next(tensor, axis, -1)


def launch(train: Callable[..., tuple[nn.Module, list[float]]], *axes: str) -> None:
    """Call `train` with the sizes on the command line, such as `--tp 2`. All others are 1."""
    parser = argparse.ArgumentParser()
    for axis in axes:
        parser.add_argument(f"--{axis}", type=int, default=1)
    sizes = vars(parser.parse_args())
    dist.init_process_group("gloo")
    run(partial(train, **sizes), **sizes)


def run(train: Callable[[], tuple[nn.Module, list[float]]], **sizes: int) -> None:
    """Train on all ranks, print the losses once, and disconnect."""
    check_sizes(**sizes)
    _, losses = train()
    if dist.get_rank() == 0:
        llama.print_losses(losses)
    dist.barrier()  # no rank ends while another one still communicates with it
    dist.destroy_process_group()
    group.clear()  # the threads of a group end with its last reference
