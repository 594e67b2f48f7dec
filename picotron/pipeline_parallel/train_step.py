"""The training step of a rank without a pipeline. (`pipeline_parallel` has the steps of a pipeline.)"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Model(Protocol):
    """What a step needs of its model, a `PipelineParallel` in a `DataParallel`."""

    require_backward_grad_sync: bool

    def __call__(self, **batch: Any) -> Tensor: ...
    def backward(self, x: Tensor | None, y: Any, dy: Tensor | None, /) -> Tensor | None: ...
    def finish_grad_sync(self) -> None: ...


class Loader(Protocol):
    """What a step needs of its data loader: this rank's next micro-batches, and their number in a step."""

    grad_acc_steps: int

    def __next__(self) -> dict[str, Any]: ...


Step = Callable[[Any, Any], Tensor]
"""A training step or an evaluation: a function of a `Model` and a `Loader`. It returns the mean loss over this rank's
tokens, which is 0 on all stages except the last."""


def train_step(model: Model, data_loader: Loader, device: torch.device) -> Tensor:
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
