"""The pipeline of a config: the schedule of a training step, and the layers of each stage. No torch."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from picotron.console import UserError
from picotron.model.families import architecture
from picotron.pipeline_parallel.stages import (
    Stage,
    balanced_stages,
    format_stages,
    parse_stages,
)
from picotron.schedules.actions import AnyAction, Schedule
from picotron.schedules.checker import check
from picotron.schedules.schedule_csv import read_csv
from picotron.schedules.schedules import build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config
    from picotron.schedules.search import Shape


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The schedule and the stages of a pipeline. Prints as a table of the layers of each rank.

    Args:
        schedule: the schedule of a training step.
        stages: all stages of the pipeline, by number.
        keep_activations: number of forwards in flight on a rank that keep their activations, see `kept_activations`.
        expectation: why a search chose the schedule, in a sentence; None if the config names the schedule.
    """

    schedule: Schedule
    stages: list[Stage]
    keep_activations: int = 0
    expectation: str | None = None

    def stages_of(self, rank: int) -> dict[int, Stage]:
        """Return the stages of a rank, by number."""
        return {number: self.stages[number] for number in self.schedule.stages_of(rank)}

    def kept_activations(self, rank: int) -> set[tuple[int, int]]:
        """Return (stage, micro-batch) of the forwards of a rank that keep their activations."""
        return kept_activations(self.schedule.programs[rank], self.keep_activations)

    @property
    def all_kept_activations(self) -> set[tuple[int, int]]:
        """(stage, micro-batch) of the forwards of all ranks that keep their activations."""
        return {each for rank in range(self.schedule.pp) for each in self.kept_activations(rank)}

    @property
    def kept_fraction(self) -> float:
        """The fraction of all forwards that keep their activations."""
        return len(self.all_kept_activations) / (self.schedule.num_stages * self.schedule.micro_batches)

    def __str__(self) -> str:
        table = format_stages(self.stages, self.schedule.pp, self.schedule.placement)
        return table if self.expectation is None else f"{table}\n{self.expectation}"

    @property
    def last_rank(self) -> int:
        """The rank with the last stage. In a V, it also has the first one."""
        return self.schedule.rank_of(len(self.stages) - 1)


def training_schedule(config: "Config") -> Schedule:
    """Return the schedule that a config names, checked. A pipeline of one rank has one stage, whatever pp_engine is.

    Raises:
        UserError: the schedule does not work with these numbers, or its CSV file has a fault or does not match them.
    """
    layout, micro_batches = config.distributed, config.training.gradient_accumulation_steps
    if layout.pp_size == 1:
        return build("1f1b", 1, micro_batches)
    if layout.pp_engine.startswith("csv:"):
        return _from_file(layout.pp_engine.removeprefix("csv:"), layout.pp_size, micro_batches, layout.pp_chunks)
    schedule = build(layout.pp_engine, layout.pp_size, micro_batches, layout.pp_chunks, layout.pp_group_size)
    check(schedule)
    return schedule


def _from_file(path: str, pp: int, micro_batches: int, chunks: int | None) -> Schedule:
    schedule = read_csv(path)
    for key, in_file, in_config in (
        ("distributed.pp_size", schedule.pp, pp),
        ("training.gradient_accumulation_steps", schedule.micro_batches, micro_batches),
        ("distributed.pp_chunks", schedule.chunks, chunks),
    ):
        if in_config not in (in_file, None):
            raise UserError(
                f"the schedule {path!r} is for {key}={in_file}, but the config has {in_config}; make them equal"
            )
    return schedule


def plan_pipeline(config: "Config", model_config: "PreTrainedConfig") -> PipelinePlan:
    """Choose the schedule and the stages of a config's pipeline.

    Raises:
        UserError: `training_schedule` or `search_schedule` fails, or the stages do not fit the model.
    """
    layout, keep = config.distributed, config.distributed.pp_keep_activations
    if layout.pp_engine == "auto" and layout.pp_size > 1:
        from picotron.pipeline_parallel.auto import search_schedule  # other engines need none of it

        plan = dataclasses.replace(search_schedule(config, model_config), keep_activations=keep)
    else:
        schedule = training_schedule(config)
        plan = PipelinePlan(schedule, stages_for(config, model_config, (schedule.chunks, schedule.placement)), keep)
    for rank in range(layout.pp_size):
        if not any(str(stage) for stage in plan.stages_of(rank).values()):
            raise UserError(
                f"pp_layout={layout.pp_layout!r} gives pp rank {rank} nothing; give it a layer, the embedding or the head"
            )
    return plan


def stages_for(config: "Config", model_config: "PreTrainedConfig", shape: "Shape") -> list[Stage]:
    """Return the stages of a config's pp_layout, or the balanced ones."""
    (chunks, placement), layout = shape, config.distributed
    if layout.pp_layout is None:
        return balanced_stages(model_config, config.training.seq_length, layout.pp_size, chunks, placement)
    return parse_stages(layout.pp_layout, model_config.num_hidden_layers, layout.pp_size * chunks)


def kept_activations(program: Sequence[AnyAction], limit: int) -> set[tuple[int, int]]:
    """Choose the forwards of a rank that keep their activations: each one that starts while fewer than `limit` of those
    that were chosen before it wait for their backward. With 1F1B, these are the first `limit` micro-batches of each
    window of as many as are in flight (`num_microbatches_with_partial_activation_checkpoints` in Megatron-LM).

    Args:
        program: the actions of a rank.
        limit: number of (stage, micro-batch) whose activations fit in memory at the same time.

    Returns:
        (stage, micro-batch) of these forwards.
    """
    kept: set[tuple[int, int]] = set()
    in_flight: set[tuple[int, int]] = set()
    for action in program:
        for kind, stage, micro_batch in action.parts[::-1]:  # the executor runs the backward of a pair first
            if kind == "F" and len(in_flight) < limit:
                kept.add((stage, micro_batch))
                in_flight.add((stage, micro_batch))
            elif kind in ("B", "I"):
                in_flight.discard((stage, micro_batch))
    return kept


KEYS = {
    "distributed": ("tp_size", "sequence_parallel", "cp_size", "cp_sharding", "cp_engine", "use_cpu"),
    "model": ("dtype", "float8", "use_flash_attention"),
    "training": ("seq_length", "micro_batch_size", "activation_checkpointing"),
}


def settings_of(config: "Config", model_config: "PreTrainedConfig", stages: Sequence[Stage]) -> dict[str, Any]:
    """Return what the time of an action of a stage depends on: not the schedule, nor the number of micro-batches."""
    layout, compiled = config.distributed, config.training.compile
    keys = {f"{name}.{key}": getattr(getattr(config, name), key) for name, section in KEYS.items() for key in section}
    return {
        **{f"{key} of the model": value for key, value in architecture(model_config).items()},
        **keys,
        "training.compile": not layout.use_cpu if compiled is None else compiled,
        "distributed.pp_keep_activations": layout.pp_keep_activations,
        "dataset.mask_documents": config.dataset.masks_documents,
        "environment.OMP_NUM_THREADS": config.environment.OMP_NUM_THREADS if layout.use_cpu else None,
        # With ZeRO-3, actions wait for weights; all other data parallelism runs between actions.
        "number of ranks that shard the weights": layout.dp_size * layout.cp_size if layout.dp_engine == "zero3" else 1,
        "stages": "|".join(map(str, stages)),
    }
