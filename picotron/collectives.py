"""Collectives that skip groups of one rank or pass on errors, and the dtype in which sums are accumulated."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.console import UserError

T = TypeVar("T")

# torch 2.13 renames these two and warns about the old names, which are the only ones in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Call `torch.distributed.all_reduce`, which works in place, unless the group has one rank.

    Args:
        group: None stands for all ranks.

    Returns:
        The handle to wait for if `async_op`, else None; also None for a group of one.
    """
    if dist.get_world_size(group) == 1:
        return None
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def own_slice(buffer: Tensor, group: dist.ProcessGroup) -> slice:
    """Return this rank's slice of a flat buffer that is divided evenly over the ranks of a group."""
    size, rank = len(buffer) // dist.get_world_size(group), dist.get_rank(group)
    return slice(rank * size, (rank + 1) * size)


def start_reduce_to_slices(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to average `own_slice` of a buffer over the group, in place. The rest of the buffer keeps local values.

    Returns:
        The handle to wait for; None for a group of one.
    """
    if dist.get_world_size(group) == 1:
        return None
    own = buffer[own_slice(buffer, group)]
    return reduce_scatter_single(own, buffer, op=dist.ReduceOp.AVG, group=group, async_op=True)


def start_gather_of_slices(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to fill a buffer with `own_slice` of each rank, in place. The result is as in `start_reduce_to_slices`."""
    if dist.get_world_size(group) == 1:
        return None
    return all_gather_single(buffer, buffer[own_slice(buffer, group)], group=group, async_op=True)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to sum numbers like those of x: float32 or wider. In bfloat16, 256 + 1 = 256."""
    return torch.promote_types(x.dtype, torch.float32)


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `function` on every rank of a group and gather the results on all of them, ordered by rank.

    Raises:
        UserError: on every rank if any rank raises it, because no rank may continue alone.
    """
    mine: tuple[T | None, tuple[str, ...]]
    try:
        mine = (function(), ())
    except UserError as error:
        mine = (None, error.problems)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for _, problems in everyone:
        if problems:
            raise UserError(*problems)
    return [result for result, _ in everyone]
