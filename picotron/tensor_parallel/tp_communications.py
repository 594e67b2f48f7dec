"""The collectives of tensor parallelism as autograd functions: each is a pair, a forward and its backward.

A tensor is full (unsharded, and identical on all tp ranks), sharded (each rank holds one shard, along `dim`) or partial
(its true value is the sum of the ranks' tensors). If each rank uses a full tensor in a different computation, the
gradients that return to it are partial; if all ranks use it in the same computation, they are full. Each term of a sum
has the gradient of the sum. So a collective's backward is another collective, see the table of pairs below. None of
these works in place.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.collectives import all_gather_single, all_reduce, reduce_scatter_single

Group = dist.ProcessGroup
Finish = Callable[[], Tensor]  # waits for a collective that has started, and returns its result
Start = Callable[..., Finish]  # of a tensor, a group and, if it is not SEQUENCE, a dimension
SEQUENCE = 1  # the dimension of (B, T, D) that sequence parallelism shards


def after(work: dist.Work | None, result: Finish) -> Finish:
    """Return a function that waits for `work` and returns `result()`."""

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return result()

    return wait


def start_all_gather(shard: Tensor, group: Group, dim: int = SEQUENCE) -> Finish:
    """Start to gather the ranks' shards to the full tensor."""
    shards = shard.new_empty(dist.get_world_size(group), *shard.shape)  # one block of memory per rank
    work = all_gather_single(shards.flatten(0, 1), shard.contiguous(), group=group, async_op=True)
    return after(work, lambda: shards.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(partial: Tensor, group: Group) -> Finish:
    """Start to sum the ranks' tensors, of which each rank gets its shard of the sequence."""
    shards = torch.stack(partial.chunk(dist.get_world_size(group), SEQUENCE))  # one block of memory per rank
    shard = torch.empty_like(shards[0])
    work = reduce_scatter_single(shard, shards.flatten(0, 1), group=group, async_op=True)
    return after(work, lambda: shard)


def start_all_reduce(partial: Tensor, group: Group) -> Finish:
    """Start to sum the ranks' tensors to the full one."""
    full = partial.clone()
    return after(all_reduce(full, group, async_op=True), lambda: full)


def start_sum(partial: Tensor, group: Group, sequence_parallel: bool) -> Finish:
    """Start to sum partial (B, T, D) over the ranks: to (B, T, D), or with sequence parallelism to a shard of it."""
    return start_reduce_scatter(partial, group) if sequence_parallel else start_all_reduce(partial, group)


def keep_shard(full: Tensor, group: Group, dim: int) -> Finish:
    return lambda: full.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def identity(x: Tensor, group: Group) -> Finish:
    return lambda: x


class Pair(torch.autograd.Function):
    """forward: one collective of a pair. backward: the other one. `where` is the group and, where it matters, `dim`."""

    @staticmethod
    def forward(ctx: Any, start: Start, start_backward: Start, x: Tensor, *where: Any) -> Tensor:
        ctx.start_backward, ctx.where = start_backward, where
        return start(x, *where)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.start_backward(gradient, *ctx.where)(), *[None] * len(ctx.where)


def pair(start: Start, start_backward: Start) -> Callable[..., Tensor]:
    return functools.partial(Pair.apply, start, start_backward)


# Korthikanti et al. 2022: arXiv:2205.05198; Shoeybi et al. 2019: arXiv:1909.08053.
# fmt: off
#                        forward               backward
copy_to_ranks     = pair(identity,             start_all_reduce)      # full -> full: `f` in Shoeybi et al. 2019
reduce_from_ranks = pair(start_all_reduce,     identity)              # partial -> full: `g` there
all_gather        = pair(start_all_gather,     start_reduce_scatter)  # sharded -> full: `g` in Korthikanti et al. 2022
reduce_scatter    = pair(start_reduce_scatter, start_all_gather)      # partial -> sharded: its conjugate there
gather_from_ranks = pair(start_all_gather,     keep_shard)            # sharded -> full, for the same use on all ranks
# fmt: on


@torch.compiler.disable
def enter(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Begin a block: return the full x (B, T, D) of x, or with sequence parallelism of its shard (B, T/tp, D). Its
    gradient is summed over the ranks, each of which uses x in a different computation.
    """
    return all_gather(x, group) if sequence_parallel else copy_to_ranks(x, group)


@torch.compiler.disable
def leave(partial: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """End a block: sum partial (B, T, D) over the ranks to (B, T, D), or with sequence parallelism to a shard of it,
    (B, T/tp, D).
    """
    return reduce_scatter(partial, group) if sequence_parallel else reduce_from_ranks(partial, group)


@torch.compiler.disable
def mean_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Compute the mean of the ranks' tensors, which each rank uses in a different computation."""
    return copy_to_ranks(reduce_from_ranks(x / dist.get_world_size(group), group), group)
