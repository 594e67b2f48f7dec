"""An all-reduce that skips groups of one rank, and the dtype in which sums are accumulated."""

import torch
import torch.distributed as dist
from torch import Tensor

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


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to sum numbers like those of x: float32 or wider. In bfloat16, 256 + 1 = 256."""
    return torch.promote_types(x.dtype, torch.float32)
