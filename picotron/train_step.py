"""The training step, and the choice of the step and the evaluation that a config asks for."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from picotron.config import Config
from picotron.data.loader import BatchList, MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel
from picotron.pipeline_parallel.executor import Executor
from picotron.pipeline_parallel.pipeline_parallel import train_step_pipeline_1f1b, train_step_pipeline_afab
from picotron.pipeline_parallel.plan import PipelinePlan
from picotron.schedules.schedules import forward_only


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step or an evaluation: a function of the model and the loader of its micro-batches.

    Args:
        run: the function. It returns the mean loss over this rank's tokens, which is 0 on all stages except the last.
        micro_batches: the number of micro-batches that the step is for; None if it works with any number.
        cp_sharding: the sharding of sequences that the model's attention assumes.
    """

    run: Callable[[DataParallel, Any], Tensor]
    micro_batches: int | None = None
    cp_sharding: str = "zigzag"

    def __call__(self, model: DataParallel, data_loader: Any) -> Tensor:
        return self.run(model, data_loader)


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


def make_train_step(config: Config, plan: PipelinePlan, device: torch.device, dtype: torch.dtype) -> Step:
    """Return the training step that a config asks for: `train_step` without a pipeline, one of the two hand-written
    pipeline loops, or an `Executor` of any other schedule.
    """
    layout = config.distributed
    if layout.pp_size == 1:
        return Step(functools.partial(train_step, device=device), cp_sharding=layout.cp_sharding)
    loops = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}
    if loop := loops.get(layout.pp_engine):
        return Step(functools.partial(run_loop, loop, device=device, dtype=dtype), cp_sharding=layout.cp_sharding)
    executor = functools.partial(Executor(plan.schedule), device=device)
    return Step(executor, plan.schedule.micro_batches, layout.cp_sharding)


def run_loop(
    loop: Callable[..., Tensor], model: DataParallel, data_loader: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Run a step of one of the two loops, with the shapes of its micro-batches, which may differ."""
    batches = [next(data_loader) for _ in range(data_loader.grad_acc_steps)]
    pipeline: Any = model.module
    shapes = [pipeline.receives(1, batch).shape for batch in batches]
    return loop(model, BatchList(batches), shapes, device, dtype)


def make_evaluation(config: Config, plan: PipelinePlan, device: torch.device) -> Step:
    """Return a function that computes the mean loss over the loader's next micro-batches: an `Executor` of a schedule
    that has only forwards, for any number of micro-batches.
    """
    schedule = plan.schedule

    @functools.cache
    def executor(micro_batches: int) -> Executor:
        return Executor(forward_only(schedule.pp, micro_batches, schedule.chunks, schedule.placement))

    def evaluate(model: DataParallel, data_loader: Any) -> Tensor:
        return executor(data_loader.grad_acc_steps)(model, data_loader, device)

    return Step(evaluate, cp_sharding=config.distributed.cp_sharding)
