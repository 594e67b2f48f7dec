"""The communication of tensor parallelism, as autograd functions: named pairs of what forward and backward do.

A tensor can be whole (the same on all tp ranks), a shard (a piece for each rank), or partial (the sum over ranks is
meant). If every rank uses a whole tensor for its own part of the work, the gradients that come back are partial.

    CopyToRanks      whole   -> whole      backward: all-reduce           `f` in Shoeybi et al. 2019
    ReduceFromRanks  partial -> whole      backward: identity             `g` in Shoeybi et al. 2019
    GatherFromRanks  shards  -> whole      backward: keep the own shard
    AllGather        shards  -> whole      backward: reduce-scatter       `g` in Korthikanti et al. 2022
    ReduceScatter    partial -> shards     backward: all-gather           its conjugate there

GatherFromRanks is for what all ranks go on to compute alike (its gradient is whole), AllGather for what each uses in
its own way (its gradient is partial). All are out of place, and free in a group of one. Shards are along `dim`.
(Shoeybi et al.: arXiv:1909.08053; Korthikanti et al.: arXiv:2205.05198)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.collectives import all_gather_single, all_reduce, reduce_scatter_single

Group = dist.ProcessGroup


def start_all_gather(shard: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    """Begin to collect every rank's shard; the result of calling the result is the whole tensor."""
    size = dist.get_world_size(group)
    if size == 1:
        return lambda: shard
    shards = shard.new_empty(size, *shard.shape)
    work = all_gather_single(shards.flatten(0, 1), shard.contiguous(), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return shards.movedim(0, dim).flatten(dim, dim + 1)

    return finish


def start_reduce_scatter(partial: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    """Begin to sum over the ranks; the result of calling the result is this rank's shard of the sum."""
    size = dist.get_world_size(group)
    if size == 1:
        return lambda: partial
    shards = torch.stack(partial.chunk(size, dim))  # each rank's shard is one block of memory
    shard = torch.empty_like(shards[0])
    work = reduce_scatter_single(shard, shards.flatten(0, 1), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return shard

    return finish


def start_all_reduce(partial: Tensor, group: Group) -> Callable[[], Tensor]:
    """Begin to sum over the ranks; the result of calling the result is the whole tensor."""
    if dist.get_world_size(group) == 1:
        return lambda: partial
    whole = partial.clone()
    work = all_reduce(whole, group, async_op=True)

    def finish() -> Tensor:
        assert work is not None
        work.wait()
        return whole

    return finish


def own_shard(whole: Tensor, dim: int, group: Group) -> Tensor:
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


class CopyToRanks(torch.autograd.Function):
    """forward: identity. backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:  # it comes later, see `split_backward`
            return None, None
        return start_all_reduce(gradient, ctx.group)(), None


class ReduceFromRanks(torch.autograd.Function):
    """forward: all-reduce. backward: identity."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return start_all_reduce(partial, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherFromRanks(torch.autograd.Function):
    """forward: all-gather. backward: keep the own shard."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(shard, dim, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_shard(gradient, ctx.dim, ctx.group), None, None


class AllGather(torch.autograd.Function):
    """forward: all-gather. backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(shard, dim, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(gradient, ctx.dim, ctx.group)(), None, None


class ReduceScatter(torch.autograd.Function):
    """forward: reduce-scatter. backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_reduce_scatter(partial, dim, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_all_gather(gradient, ctx.dim, ctx.group)(), None, None
