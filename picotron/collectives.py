"""Collectives that skip groups of one rank or pass on errors, and the dtype in which sums are accumulated."""

from collections.abc import Callable, Mapping
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


def check_equal(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Check that every rank of a group has the same tensors, by a sum of the bits of each. Tensors without values, such
    as those on the meta device, are skipped.

    Raises:
        UserError: a tensor differs, with its name.
    """
    memory = {name: x.untyped_storage() for name, x in tensors.items()}
    held = [name for name, each in memory.items() if each.device.type != "meta" and each.nbytes() > 0]
    if dist.get_world_size(group) == 1 or not held:
        return
    sums = []
    for x in (tensors[name].detach() for name in held):
        bits = x.flatten().view(getattr(torch, f"int{8 * min(x.itemsize, 8)}"))
        # Integers that wrap around have the same sum in any order, and in their own dtype it is fast.
        sums.append(bits.sum(dtype=bits.dtype).to(tensors[held[0]].device, torch.int64))
    largest = torch.stack([torch.stack(sums), -torch.stack(sums)])
    all_reduce(largest, group, dist.ReduceOp.MAX)
    for name, differs in zip(held, (largest[0] != -largest[1]).tolist(), strict=True):  # waits for the GPU only once
        if differs:
            raise UserError(
                f"{name} differs between ranks {dist.get_process_group_ranks(group)}, which must start with equal weights; "
                f"load the same file on all of them, or call torch.manual_seed before the model is built"
            )


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
