"""docs/tensor_parallel.md, exercise 2: an MLP over tp ranks, from two communication pairs."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from picotron.tensor_parallel.tp_communications import CopyToRanks, ReduceFromRanks


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor, group: dist.ProcessGroup) -> Tensor:
    """y = silu(x up') down'.

    Args:
        x: (T, D), the same on all ranks.
        up: (F/tp, D), this rank's rows of the first matrix.
        down: (D, F/tp), this rank's columns of the second one.
    """
    x = CopyToRanks.apply(x, group)  # backward: each rank has the gradient of its hidden units, so they are summed
    h = F.silu(x @ up.t())  # (T, F/tp): no other rank has these hidden units, or needs them
    return ReduceFromRanks.apply(h @ down.t(), group)
