"""The collectives of tensor parallelism as autograd functions: each is a pair, a forward and its backward.

A tensor is full (unsharded, and identical on all tp ranks), sharded (each rank holds one shard, along `dim`) or partial
(its true value is the sum of the ranks' tensors). If each rank uses a full tensor in a different computation, the
gradients that return to it are partial.

    CopyToRanks      full    -> full       backward: all-reduce           `f` in Shoeybi et al. 2019
    ReduceFromRanks  partial -> full       backward: identity             `g` in Shoeybi et al. 2019
    GatherFromRanks  sharded -> full       backward: keep this rank's shard
    AllGather        sharded -> full       backward: reduce-scatter       `g` in Korthikanti et al. 2022
    ReduceScatter    partial -> sharded    backward: all-gather           the conjugate of `g` there

GatherFromRanks is for a result that all ranks use in the same computation, so its gradient is full; AllGather is for a
result that each rank uses in a different computation, so its gradient is partial. None of the functions works in place,
and none communicates in a group of one rank.
(Shoeybi et al.: arXiv:1909.08053; Korthikanti et al.: arXiv:2205.05198)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.collectives import all_gather_single, all_reduce, reduce_scatter_single

Group = dist.ProcessGroup
SEQUENCE = 1  # the dimension of (B, T, D) that sequence parallelism shards


def start_all_gather(shard: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    """Start an all-gather. Returns a function that waits for it and returns the full tensor."""
    size = dist.get_world_size(group)
    if size == 1:
        return lambda: shard
    shards = shard.new_empty(size, *shard.shape)  # one block of memory per rank
    work = all_gather_single(shards.flatten(0, 1), shard.contiguous(), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return shards.movedim(0, dim).flatten(dim, dim + 1)

    return finish


def start_reduce_scatter(partial: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    """Start a reduce-scatter. Returns a function that waits for it and returns this rank's shard of the sum."""
    size = dist.get_world_size(group)
    if size == 1:
        return lambda: partial
    shards = torch.stack(partial.chunk(size, dim))  # one block of memory per rank
    shard = torch.empty_like(shards[0])
    work = reduce_scatter_single(shard, shards.flatten(0, 1), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return shard

    return finish


def start_all_reduce(partial: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start an all-reduce. Returns a function that waits for it and returns the full tensor."""
    if dist.get_world_size(group) == 1:
        return lambda: partial
    full = partial.clone()
    work = all_reduce(full, group, async_op=True)

    def finish() -> Tensor:
        assert work is not None
        work.wait()
        return full

    return finish


def own_shard(full: Tensor, dim: int, group: Group) -> Tensor:
    return full.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


class CopyToRanks(torch.autograd.Function):
    """forward: identity. backward: all-reduce, because the ranks' gradients are partial."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_all_reduce(gradient, ctx.group)(), None


class ReduceFromRanks(torch.autograd.Function):
    """forward: all-reduce. backward: identity, because each term of a sum has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return start_all_reduce(partial, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherFromRanks(torch.autograd.Function):
    """forward: all-gather. backward: keep this rank's shard of the gradient, which is full."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(shard, dim, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_shard(gradient, ctx.dim, ctx.group), None, None


class AllGather(torch.autograd.Function):
    """forward: all-gather. backward: reduce-scatter, because the ranks' gradients are partial."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(shard, dim, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(gradient, ctx.dim, ctx.group)(), None, None


class ReduceScatter(torch.autograd.Function):
    """forward: reduce-scatter. backward: all-gather, because each rank's tensor is a term of all shards."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_reduce_scatter(partial, dim, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_all_gather(gradient, ctx.dim, ctx.group)(), None, None


@torch.compiler.disable
def sum_over_ranks(partial: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Sum partial (B, T, D) over the ranks: to (B, T, D), or with sequence parallelism to a shard, (B, T/tp, D)."""
    return ReduceScatter.apply(partial, SEQUENCE, group) if sequence_parallel else ReduceFromRanks.apply(partial, group)


@torch.compiler.disable
def mean_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Compute the mean of the ranks' tensors, which each rank uses in a different computation."""
    return CopyToRanks.apply(ReduceFromRanks.apply(x / dist.get_world_size(group), group), group)
