"""The learning-rate schedule."""

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from picotron.config import Training


def learning_rate_factor(training: Training) -> Callable[[int], float]:
    """Return the function from the step (0, 1, 2, ...) to the fraction of `learning_rate`: a linear warm-up, then a
    decay to `min_lr_ratio`.

    The first step's fraction is not 0, which would waste the step. The last step's fraction is slightly larger than
    `min_lr_ratio`, which is reached at `total_train_steps`. Cosine: Loshchilov and Hutter 2016, arXiv:1608.03983. WSD
    (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395; until the decay begins, its fractions do not depend on
    `total_train_steps`, so that a run can be resumed with more steps.
    """
    warmup, total, low = training.warmup_steps, training.total_train_steps, training.min_lr_ratio
    start = total - training.decay if training.lr_scheduler == "wsd" else warmup
    shapes = {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: low + (1 - low) * (1 - progress),
        "wsd": lambda progress: low + (1 - low) * (1 - progress),
        "cosine": lambda progress: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)),
    }

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return shapes[training.lr_scheduler](min(1.0, max(0.0, (step - start) / (total - start))))

    return factor


def make_scheduler(optimizer: torch.optim.Optimizer, training: Training, step: int = 0) -> LambdaLR:
    """Return the learning-rate schedule after `step` completed steps."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, learning_rate_factor(training), last_epoch=step - 1)
