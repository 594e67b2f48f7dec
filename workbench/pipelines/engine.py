"""Steps of a pipeline with any schedule, and of programs with batches of their own: what train.py's door leads to."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.console import UserError
from picotron.model.llama import Llama
from picotron.pipeline_parallel.pipeline_parallel import (
    Step,
    train_step,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from workbench.pipelines import planning
from workbench.pipelines.executor import Executor
from workbench.pipelines.modules import LlamaStages
from workbench.pipelines.plan import SchedulePlan
from workbench.pipelines.recorder import record_steps
from workbench.run import layout_checks
from workbench.schedules.schedules import forward_only

LOADED = 64  # micro-batches of an evaluation that are in memory at a time


class BatchList:
    """A data loader of micro-batches in a list, for one step."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self.batches, self.grad_acc_steps = iter(batches), len(batches)

    def __next__(self) -> dict[str, Any]:
        return next(self.batches)


@dataclasses.dataclass(frozen=True)
class ExecutorPlan(SchedulePlan):
    """A plan that can run: an `Executor` follows its schedule, or one of the two loops if that does."""

    def wrap(self, model: Llama) -> LlamaStages:
        """Reduce a Llama to this rank's stages."""
        return LlamaStages(model, self, pgm.process_group_manager.pp_rank)

    def make_steps(
        self, config: Config, model_config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, done: int = 0
    ) -> tuple[Step, Step]:
        """Return the training step and the evaluation of a run that has completed `done` steps."""
        step = make_train_step(config, self, device, dtype)
        return record_steps(step, config, model_config, self, device, done), make_evaluation(config, self, device)


def plan_pipeline(config: Config, model_config: PreTrainedConfig) -> ExecutorPlan:
    """Choose the schedule and the stages of a config's pipeline, see `planning.plan_pipeline`."""
    plan = ExecutorPlan(**vars(planning.plan_pipeline(config, model_config)))
    if config.model.float8 and plan.splits_backward:
        raise UserError(
            f"model.float8=true cannot split a backward, as distributed.pp_engine={config.distributed.pp_engine!r} "
            f"requires; use another pp_engine, such as '1f1b', or float8=false"
        )
    return plan


def check_layout(config: Config, model_config: PreTrainedConfig) -> ExecutorPlan:
    """Check that the model can run in the config's layout, and return the plan of its pipeline, see
    `layout_checks.check_layout`.
    """
    plan: Any = layout_checks.check_layout(config, model_config, plan_pipeline)
    return plan


def check_model(config: Config) -> tuple[PreTrainedConfig, ExecutorPlan]:
    """Load the model's config, and check the layout, see `layout_checks.check_model`."""
    found: Any = layout_checks.check_model(config, plan_pipeline)
    return found


def check_run(config: Config) -> tuple[PreTrainedConfig, ExecutorPlan]:
    """Check a run before it starts, see `layout_checks.check_run`."""
    found: Any = layout_checks.check_run(config, plan_pipeline)
    return found


def make_train_step(config: Config, plan: SchedulePlan, device: torch.device, dtype: torch.dtype) -> Step:
    """Return the training step that a config asks for: `train_step` without a pipeline, one of the two hand-written
    pipeline loops, or an `Executor` of the plan's schedule.
    """
    layout = config.distributed
    if layout.pp_size == 1:
        return functools.partial(train_step, device=device)
    if config.needs_workbench:
        return functools.partial(Executor(plan.schedule), device=device)
    loop = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}[layout.pp_engine]
    return functools.partial(run_loop, loop, device=device, dtype=dtype)


def run_loop(
    loop: Callable[..., Tensor], model: Any, data_loader: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Run a step of one of the two loops, with the shapes of its micro-batches, which may differ."""
    batches = [next(data_loader) for _ in range(data_loader.grad_acc_steps)]
    shapes = [model.module.receives(1, batch).shape for batch in batches]
    return loop(model, BatchList(batches), shapes, device, dtype)


def make_evaluation(config: Config, plan: SchedulePlan, device: torch.device) -> Step:
    """Return a function that computes the mean loss over the loader's next micro-batches: an `Executor` of a schedule
    that has only forwards, for at most LOADED micro-batches at a time.
    """
    schedule = plan.schedule

    @functools.cache
    def executor(micro_batches: int) -> Executor:
        return Executor(forward_only(schedule.pp, micro_batches, schedule.chunks, schedule.placement))

    def evaluate(model: Any, data_loader: Any) -> Tensor:
        loss, count = torch.zeros((), device=device), data_loader.grad_acc_steps
        for done in range(0, count, LOADED):
            batches = [next(data_loader) for _ in range(min(LOADED, count - done))]
            loss = loss + executor(len(batches))(model, BatchList(batches), device) * (len(batches) / count)
        return loss

    return evaluate
