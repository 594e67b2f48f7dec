"""The plan of a pipeline with any schedule: the schedule of a training step, and the layers of each stage. No torch."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from picotron.model.families import architecture
from picotron.pipeline_parallel.stages import Stage
from workbench.pipelines.layouts import stages_for
from workbench.run.stage_table import format_stages
from workbench.schedules.actions import AnyAction, Schedule, rank_of
from workbench.schedules.schedule_csv import as_csv

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config
    from workbench.schedules.search import Shape


Forwards = set[tuple[int, int]]  # (stage, micro-batch)


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """The stages of a pipeline and the schedule of a training step. Prints as a table of the layers of each rank.

    Args:
        stages: all stages of the pipeline, by number.
        schedule: the schedule of a training step.
        keep_activations: number of forwards in flight on a rank that keep their activations, see `kept_activations`.
        expectation: why a search chose the schedule, in a sentence; None if the config names the schedule.
    """

    stages: list[Stage]
    schedule: Schedule
    keep_activations: int = 0
    expectation: str | None = None

    def __str__(self) -> str:
        table = format_stages(self.stages, [self.schedule.rank_of(i) for i in range(len(self.stages))])
        return table if self.expectation is None else f"{table}\n{self.expectation}"

    def stages_of(self, rank: int) -> dict[int, Stage]:
        """Return the stages of a rank, by number."""
        return {number: self.stages[number] for number in self.schedule.stages_of(rank)}

    def kept_activations(self, rank: int) -> Forwards:
        """Return the forwards of a rank that keep their activations."""
        return kept_activations(self.schedule.programs[rank], self.keep_activations)

    @property
    def all_kept_activations(self) -> Forwards:
        """The forwards of all ranks that keep their activations."""
        return {each for rank in range(self.schedule.pp) for each in self.kept_activations(rank)}

    @property
    def kept_fraction(self) -> float:
        """The fraction of all forwards that keep their activations."""
        return len(self.all_kept_activations) / (self.schedule.num_stages * self.schedule.micro_batches)

    @property
    def last_rank(self) -> int:
        """The rank with the last stage. In a V, it also has the first one."""
        return self.schedule.rank_of(len(self.stages) - 1)

    @property
    def splits_backward(self) -> bool:
        return self.schedule.splits_backward

    @property
    def identity(self) -> str:
        return as_csv(self.schedule.programs)

    @property
    def searched(self) -> str | None:
        return self.identity if self.expectation else None


def layout_stages(config: "Config", model_config: "PreTrainedConfig", shape: "Shape") -> list[Stage]:
    """Return the stages of a config for a number of chunks and their placement. Raises a UserError as `stages_for`."""
    (chunks, placement), pp = shape, config.distributed.pp_size
    return stages_for(config, model_config, [rank_of(stage, pp, placement) for stage in range(pp * chunks)])


def kept_activations(program: Sequence[AnyAction], limit: int) -> Forwards:
    """Choose the forwards of a rank that keep their activations: each one that starts while fewer than `limit` of those
    that were chosen before it wait for their backward. With 1F1B, these are the first `limit` micro-batches of each
    window of as many as are in flight (`num_microbatches_with_partial_activation_checkpoints` in Megatron-LM).

    Args:
        program: the actions of a rank.
        limit: number of (stage, micro-batch) whose activations fit in memory at the same time.

    Returns:
        (stage, micro-batch) of these forwards.
    """
    kept: Forwards = set()
    in_flight: Forwards = set()
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
    architecture_as_json = json.loads(json.dumps(architecture(model_config)))  # in which tuples are lists
    return {
        **{f"{key} of the model": value for key, value in architecture_as_json.items()},
        **keys,
        "training.compile": not layout.use_cpu if compiled is None else compiled,
        "distributed.pp_keep_activations": config.schedule.pp_keep_activations,  # its name in earlier recordings
        "dataset.mask_documents": config.dataset.masks_documents,
        "environment.OMP_NUM_THREADS": config.environment.OMP_NUM_THREADS if layout.use_cpu else None,
        # With ZeRO-3, actions wait for weights; all other data parallelism runs between actions.
        "number of ranks that shard the weights": layout.dp_size * layout.cp_size if layout.dp_engine == "zero3" else 1,
        "stages": "|".join(map(str, stages)),
    }
