"""The training step without a pipeline, and the choice of the step and the evaluation that a config asks for."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel
from picotron.pipeline_parallel.pipeline_parallel import (
    evaluate_pipeline,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Step = Callable[[Any, Any], Tensor]
"""A training step or an evaluation: a function of the model, a `DataParallel`, and of the loader of its micro-batches.
It returns the mean loss over this rank's tokens, which is 0 on all stages except the last."""
LOOPS = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}


def train_step(model: DataParallel, data_loader: MicroBatchDataLoader, device: torch.device) -> Tensor:
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


def make_steps(
    config: Config, model_config: "PreTrainedConfig", device: torch.device, dtype: torch.dtype
) -> tuple[Step, Step]:
    """Return the training step and the evaluation of a config whose pipeline has one stage on each rank."""
    layout, training = config.distributed, config.training
    shards = layout.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
    shape = training.micro_batch_size, training.seq_length // shards, model_config.hidden_size
    messages: dict[str, Any] = {"tensor_shapes": shape, "device": device, "dtype": dtype}
    evaluate = functools.partial(evaluate_pipeline, **messages)
    if layout.pp_size == 1:
        return functools.partial(train_step, device=device), evaluate
    return functools.partial(LOOPS[layout.pp_engine], **messages), evaluate
