"""The pipeline of a config: the schedule of a training step, and the layers of each stage. No torch."""

import dataclasses
from typing import TYPE_CHECKING

from picotron.errors import UserError
from picotron.schedules.actions import Schedule
from picotron.schedules.checker import check
from picotron.schedules.schedule_csv import read_csv
from picotron.schedules.schedules import build
from picotron.schedules.stages import Stage, balanced_stages, format_stages, parse_stages

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from picotron.config import Config


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The schedule and the stages of a pipeline. Prints as a table of the layers of each rank.

    Args:
        schedule: the schedule of a training step.
        stages: all stages of the pipeline, by number.
    """

    schedule: Schedule
    stages: list[Stage]

    def stages_of(self, rank: int) -> dict[int, Stage]:
        """Return the stages of a rank, by number."""
        return {number: self.stages[number] for number in self.schedule.stages_of(rank)}

    def __str__(self) -> str:
        return format_stages(self.stages, self.schedule.pp, self.schedule.placement)

    @property
    def last_rank(self) -> int:
        """The rank with the last stage. In a V, it also has the first one."""
        return self.schedule.rank_of(len(self.stages) - 1)

    @property
    def splits_backward(self) -> bool:
        return any(part.kind == "I" for program in self.schedule.programs for a in program for part in a.parts)


def training_schedule(config: "Config") -> Schedule:
    """Return the schedule of a training step, checked. A pipeline of one rank has one stage, whatever pp_engine is.

    Raises:
        UserError: the schedule does not work with these numbers, or its CSV file has a fault or does not match them.
    """
    layout, microbatches = config.distributed, config.training.gradient_accumulation_steps
    if layout.pp_size == 1:
        for key, value in (("pp_chunks", layout.pp_chunks), ("pp_group_size", layout.pp_group_size)):
            if value not in (1, None):
                raise UserError(f"{key}={value} needs a pipeline, but pp_size=1; remove it")
        return build("1f1b", 1, microbatches)
    if layout.pp_engine.startswith("csv:"):
        if layout.pp_group_size is not None:
            raise UserError(
                f"pp_group_size={layout.pp_group_size} cannot be used with a schedule from a file; remove it"
            )
        return _from_file(layout.pp_engine.removeprefix("csv:"), layout.pp_size, microbatches, layout.pp_chunks)
    schedule = build(layout.pp_engine, layout.pp_size, microbatches, layout.pp_chunks, layout.pp_group_size)
    check(schedule)
    return schedule


def _from_file(path: str, pp: int, microbatches: int, chunks: int | None) -> Schedule:
    schedule = read_csv(path)
    for key, in_file, in_config in (
        ("distributed.pp_size", schedule.pp, pp),
        ("training.gradient_accumulation_steps", schedule.microbatches, microbatches),
        ("distributed.pp_chunks", schedule.chunks, chunks),
    ):
        if in_config not in (in_file, None):
            raise UserError(f"the schedule {path!r} is for {key}={in_file}, but the config has {in_config}")
    return schedule


def plan_pipeline(config: "Config", model_config: "LlamaConfig") -> PipelinePlan:
    """Choose the schedule and the stages of a config's pipeline.

    Raises:
        UserError: `training_schedule` fails, or the stages do not fit the model.
    """
    schedule, layout = training_schedule(config), config.distributed.pp_layout
    if layout is None:
        seq_length = config.training.seq_length
        stages = balanced_stages(model_config, seq_length, schedule.pp, schedule.chunks, schedule.placement)
    else:
        stages = parse_stages(layout, model_config.num_hidden_layers, schedule.num_stages)
    plan = PipelinePlan(schedule, stages)
    for rank in range(schedule.pp):
        if not any(str(stage) for stage in plan.stages_of(rank).values()):
            raise UserError(
                f"pp_layout={layout!r} gives pp rank {rank} nothing; give it a layer, the embedding or the head"
            )
    return plan
