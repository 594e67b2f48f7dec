"""The training step of a rank without a pipeline. (`pipeline_parallel` has the steps of a pipeline.)"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from picotron.data.loader import MicroBatchDataLoader
    from picotron.data_parallel.data_parallel import DataParallel

Step = Callable[[Any, Any], Tensor]
"""A training step or an evaluation: a function of the model, a `DataParallel`, and of the loader of its micro-batches.
It returns the mean loss over this rank's tokens, which is 0 on all stages except the last."""


def train_step(model: "DataParallel", data_loader: "MicroBatchDataLoader", device: torch.device) -> Tensor:
    """Run forward and backward for this rank's micro-batches of one global batch. Gradients end up in `main_grad`.

    Returns:
        The mean loss over this rank's tokens: a scalar that stays on the device.
    """
    total_loss = torch.zeros((), device=device)
    for i in range(data_loader.grad_acc_steps):
        # Gradients accumulate over the micro-batches. Only the last backward averages them over the ranks.
        model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1
        loss = model(**next(data_loader)) / data_loader.grad_acc_steps
        loss.backward()
        total_loss = total_loss + loss.detach()
        del loss  # frees its graph, whose small objects would split the memory that the next forward needs
    model.finish_grad_sync()
    return total_loss
