"""The training step, and the choice of the step and the evaluation that a config asks for."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel
from picotron.pipeline_parallel.executor import Executor
from picotron.pipeline_parallel.pipeline_parallel import (
    evaluate,
    hidden_states_shape,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.pipeline_parallel.plan import PipelinePlan
from picotron.schedules.schedules import forward_only

Step = Callable[[DataParallel, MicroBatchDataLoader], Tensor]


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


def make_train_step(
    config: Config, model_config: LlamaConfig, plan: PipelinePlan, device: torch.device, dtype: torch.dtype
) -> Step:
    """Return the training step that a config asks for: `train_step` without a pipeline, one of the two hand-written
    pipeline loops, or an `Executor` of any other schedule.
    """
    if config.distributed.pp_size == 1:
        return functools.partial(train_step, device=device)
    loops = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}
    step = loops.get(config.distributed.pp_engine) or Executor(plan.schedule)
    shape = hidden_states_shape(config, model_config)
    return functools.partial(step, tensor_shapes=shape, device=device, dtype=dtype)


def make_evaluation(
    config: Config, model_config: LlamaConfig, plan: PipelinePlan, device: torch.device, dtype: torch.dtype
) -> Step:
    """Return a function that computes the mean loss over the loader's next micro-batches, see `evaluate`."""
    schedule, shape = plan.schedule, hidden_states_shape(config, model_config)

    @functools.cache
    def executor(micro_batches: int) -> Executor:
        return Executor(forward_only(schedule.pp, micro_batches, schedule.chunks, schedule.placement))

    def execute(model: DataParallel, data_loader: Any, **message: Any) -> Tensor:
        return executor(data_loader.grad_acc_steps)(model, data_loader, **message)

    step = evaluate if schedule.chunks == 1 else execute
    return functools.partial(step, tensor_shapes=shape, device=device, dtype=dtype)
