"""The plan of a pipeline: the layers of each stage, and the functions that run its steps."""

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.model.llama import Llama
from picotron.pipeline_parallel.pipeline_parallel import (
    PipelineParallel,
    evaluate_pipeline,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.pipeline_parallel.stages import Stage, balanced_stages, format_stages
from picotron.pipeline_parallel.train_step import Step, train_step

LOOPS = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The stages of a pipeline with one stage on each pp rank, which AFAB or 1F1B runs; a single one is the whole
    model. Prints as a table. The workbench has plans of all other pipelines.

    Attributes:
        stages: all stages, by pp rank.
        splits_backward: whether weight gradients are computed apart from the other ones.
        identity: text that differs between ranks if they would run different schedules.
        searched: the schedule as a CSV file, if the plan is the result of a search.
    """

    stages: list[Stage]
    splits_backward: ClassVar[bool] = False
    identity: ClassVar[str] = ""
    searched: ClassVar[str | None] = None

    def __str__(self) -> str:
        return format_stages(self.stages, range(len(self.stages)))

    def wrap(self, model: Llama) -> PipelineParallel:
        """Reduce a Llama to this rank's stages."""
        return PipelineParallel(model, self.stages[pgm.process_group_manager.pp_rank])

    def make_steps(
        self, config: Config, model_config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, done: int = 0
    ) -> tuple[Step, Step]:
        """Return the training step and the evaluation of a run that has completed `done` steps."""
        layout, training = config.distributed, config.training
        shards = layout.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
        shape = training.micro_batch_size, training.seq_length // shards, model_config.hidden_size
        messages: dict[str, Any] = {"tensor_shapes": shape, "device": device, "dtype": dtype}
        evaluate = functools.partial(evaluate_pipeline, **messages)
        if layout.pp_size == 1:
            return functools.partial(train_step, device=device), evaluate
        return functools.partial(LOOPS[layout.pp_engine], **messages), evaluate


def plan_stages(config: Config, model_config: PreTrainedConfig) -> PipelinePlan:
    """Plan a pipeline with one stage on each rank. Raises a UserError as `balanced_stages`."""
    return PipelinePlan(balanced_stages(model_config, config.training.seq_length, range(config.distributed.pp_size)))
