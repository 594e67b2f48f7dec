"""Solution of puzzle 10. With exponents that are at most 0, nothing overflows."""

import torch
from torch import Tensor


def merge(y1: Tensor, lse1: Tensor, y2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse1, lse2)
    return (lse1 - lse).exp()[..., None] * y1 + (lse2 - lse).exp()[..., None] * y2, lse
