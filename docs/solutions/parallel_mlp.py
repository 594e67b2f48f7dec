"""Solution to exercise 2 of docs/tensor_parallel.md: an MLP split over tp ranks."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from picotron.tensor_parallel.tp_communications import CopyToRanks, ReduceFromRanks


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Compute y = silu(x up') down'.

    Args:
        x: (T, D), replicated.
        up: (F/tp, D), this rank's rows of the first matrix.
        down: (D, F/tp), this rank's columns of the second matrix.
    """
    x = CopyToRanks.apply(x, group)  # backward sums the gradients that x gets from each rank's hidden units
    h = F.silu(x @ up.t())  # (T, F/tp): hidden units that no other rank has or needs
    return ReduceFromRanks.apply(h @ down.t(), group)
