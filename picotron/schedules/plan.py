"""What a config asks of the pipeline: the schedule of a training step, and what each stage holds. No torch here."""

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
    """
    Args:
        schedule: of a training step.
        stages: of the whole pipeline, by number.

    Prints as a table of what each rank holds.
    """

    schedule: Schedule
    stages: list[Stage]

    def stages_of(self, rank: int) -> dict[int, Stage]:
        """What a rank holds, by the numbers of its stages."""
        return {number: self.stages[number] for number in self.schedule.stages_of(rank)}

    def __str__(self) -> str:
        return format_stages(self.stages, self.schedule.pp, self.schedule.placement)

    @property
    def last_rank(self) -> int:
        """The rank with the last stage. In a V it also has the first one."""
        return self.schedule.rank_of(len(self.stages) - 1)

    @property
    def splits_backward(self) -> bool:
        return any(part.kind == "I" for program in self.schedule.programs for a in program for part in a.parts)


def training_schedule(config: "Config") -> Schedule:
    """The schedule of a training step, which is known to finish. (One rank has one stage, whatever pp_engine says.)

    Raises:
        UserError: there is none for these numbers, or its CSV file has other numbers or a fault.
    """
    layout, microbatches = config.distributed, config.training.gradient_accumulation_steps
    if layout.pp_size == 1:
        if layout.pp_chunks not in (1, None):
            raise UserError(f"pp_chunks={layout.pp_chunks} is about pipelines, but pp_size=1; leave it out")
        return build("1f1b", 1, microbatches)
    if layout.pp_engine.startswith("csv:"):
        return _from_file(layout.pp_engine.removeprefix("csv:"), layout.pp_size, microbatches, layout.pp_chunks)
    schedule = build(layout.pp_engine, layout.pp_size, microbatches, layout.pp_chunks)
    check(schedule)
    return schedule


def _from_file(path: str, pp: int, microbatches: int, chunks: int | None) -> Schedule:
    schedule = read_csv(path)
    for key, there, here in (
        ("distributed.pp_size", schedule.pp, pp),
        ("training.gradient_accumulation_steps", schedule.microbatches, microbatches),
        ("distributed.pp_chunks", schedule.chunks, chunks),
    ):
        if here not in (there, None):
            raise UserError(f"the schedule {path!r} is for {key}={there}, but the config says {here}")
    return schedule


def plan_pipeline(config: "Config", model_config: "LlamaConfig") -> PipelinePlan:
    """
    Raises:
        UserError: as `training_schedule`, or the model does not fit the stages.
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
            raise UserError(f"pp_layout={layout!r} leaves rank {rank} of the pipeline without anything to do")
    return plan
