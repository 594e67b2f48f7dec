"""The pipeline of a config: the schedule of a training step, and the layers of each stage. No torch."""

import dataclasses
from typing import TYPE_CHECKING

from picotron.console import UserError
from picotron.pipeline_parallel.stages import (
    Stage,
    balanced_stages,
    count_stages,
    format_stages,
    parse_stages,
    stage_weights,
)
from picotron.schedules.actions import Schedule
from picotron.schedules.checker import check
from picotron.schedules.schedule_csv import read_csv
from picotron.schedules.schedules import build
from picotron.schedules.search import Found, Shape, fastest_schedule, shapes
from picotron.schedules.simulate import Costs, simulate, summary
from picotron.schedules.trace import check_recording, recorded_costs

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from picotron.config import Config
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from picotron.schedules.actions import AnyAction

ESTIMATED_MESSAGE = 0.02  # in forwards of a micro-batch on a rank; an assumption, where nothing is measured


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
    def kept_fraction(self) -> float:
        """The fraction of all forwards that keep their activations."""
        kept = sum(len(self.kept_activations(rank)) for rank in range(self.schedule.pp))
        return kept / (self.schedule.num_stages * self.schedule.microbatches)

    def __str__(self) -> str:
        table = format_stages(self.stages, self.schedule.pp, self.schedule.placement)
        return table if self.expectation is None else f"{table}\n{self.expectation}"

    @property
    def last_rank(self) -> int:
        """The rank with the last stage. In a V, it also has the first one."""
        return self.schedule.rank_of(len(self.stages) - 1)

    @property
    def splits_backward(self) -> bool:
        return any(part.kind == "I" for program in self.schedule.programs for a in program for part in a.parts)


def training_schedule(config: "Config") -> Schedule:
    """Return the schedule that a config names, checked. A pipeline of one rank has one stage, whatever pp_engine is.

    Raises:
        UserError: the schedule does not work with these numbers, or its CSV file has a fault or does not match them.
    """
    layout, microbatches = config.distributed, config.training.gradient_accumulation_steps
    if layout.pp_size == 1:
        return build("1f1b", 1, microbatches)
    if layout.pp_engine.startswith("csv:"):
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
        UserError: `training_schedule` or `search_schedule` fails, or the stages do not fit the model.
    """
    layout, keep = config.distributed, config.distributed.pp_keep_activations
    if layout.pp_engine == "auto" and layout.pp_size > 1:
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


def stages_for(config: "Config", model_config: "LlamaConfig", shape: Shape) -> list[Stage]:
    """Return the stages of a config's pp_layout, or the balanced ones."""
    (chunks, placement), layout = shape, config.distributed
    if layout.pp_layout is None:
        return balanced_stages(model_config, config.training.seq_length, layout.pp_size, chunks, placement)
    return parse_stages(layout.pp_layout, model_config.num_hidden_layers, layout.pp_size * chunks)


def search_schedule(config: "Config", model_config: "LlamaConfig") -> PipelinePlan:
    """Find the fastest schedule for the times of a recorded run, or for times that are estimated by FLOPs.

    Raises:
        UserError: the recorded run does not match the config, or the stages do not fit the model.
    """
    layout = config.distributed
    memory = layout.pp_size if layout.pp_memory is None else layout.pp_memory
    if layout.pp_costs is None:
        found, source, unit = _search_with_estimates(config, model_config, memory), "estimated by FLOPs", "forwards"
    else:
        found, source, unit = (
            _search_with_recording(config, model_config, memory),
            f"measured in {layout.pp_costs!r}",
            "s",
        )
    schedule = found.schedule
    facts = summary(simulate(schedule, found.costs))
    expectation = (
        f"schedule: {found.name} with {schedule.chunks} chunk(s) per pp rank, {schedule.placement} placement; expected, "
        f"with times {source}: step time {facts.pop('step time')} {unit}, "
        f"{', '.join(f'{name} {value}' for name, value in facts.items())} (limit {memory:g})"
    )
    stages = stages_for(config, model_config, (schedule.chunks, schedule.placement))
    return PipelinePlan(schedule, stages, expectation=expectation)


def _search_with_estimates(config: "Config", model_config: "LlamaConfig", memory: float) -> Found:
    """Search with estimated times, in forwards of a micro-batch on an average rank: I and W take 1, an I that
    recomputes activations takes 2, and a message `ESTIMATED_MESSAGE`.
    """
    layout, training = config.distributed, config.training
    recompute = training.activation_checkpointing == "full"

    def costs_of(shape: Shape) -> Costs:
        stages = stages_for(config, model_config, shape)
        weights = stage_weights(model_config, stages, training.seq_length, layout.pp_size)
        return Costs(B=2.0 + recompute, I=1.0 + recompute, weights=weights, p2p=ESTIMATED_MESSAGE)

    chunks = layout.pp_chunks
    if chunks is None and layout.pp_layout is not None:
        chunks = max(1, count_stages(layout.pp_layout) // layout.pp_size)
    elif chunks is None and model_config.num_hidden_layers < 2 * layout.pp_size:
        chunks = 1
    options = {shape: costs_of(shape) for shape in shapes(chunks)}
    return fastest_schedule(layout.pp_size, training.gradient_accumulation_steps, memory, options)


def _search_with_recording(config: "Config", model_config: "LlamaConfig", memory: float) -> Found:
    layout = config.distributed
    assert layout.pp_costs is not None
    recorded, costs = recorded_costs(layout.pp_costs)
    for key, theirs in (("pp_size", recorded.pp), ("pp_chunks", recorded.chunks)):
        ours = getattr(layout, key)
        if ours not in (theirs, None):
            raise UserError(f"the run in pp_costs={layout.pp_costs!r} has {key}={theirs}, but the config has {ours}")
    shape = recorded.chunks, recorded.placement
    check_recording(layout.pp_costs, settings_of(config, model_config, stages_for(config, model_config, shape)))
    return fastest_schedule(layout.pp_size, config.training.gradient_accumulation_steps, memory, {shape: costs})


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
        for kind, stage, microbatch in action.parts[::-1]:  # the executor runs the backward of a pair first
            if kind == "F" and len(in_flight) < limit:
                kept.add((stage, microbatch))
                in_flight.add((stage, microbatch))
            elif kind in ("B", "I"):
                in_flight.discard((stage, microbatch))
    return kept


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


KEYS = {
    "distributed": ("tp_size", "sequence_parallel", "cp_size", "cp_sharding", "cp_engine", "use_cpu"),
    "model": ("dtype", "float8", "use_flash_attention"),
    "training": ("seq_length", "micro_batch_size", "activation_checkpointing"),
}


def settings_of(config: "Config", model_config: "LlamaConfig", stages: Sequence[Stage]) -> dict[str, Any]:
    """Return what the time of an action of a stage depends on: not the schedule, nor the number of micro-batches."""
    layout, compiled = config.distributed, config.training.compile
    keys = {f"{name}.{key}": getattr(getattr(config, name), key) for name, section in KEYS.items() for key in section}
    return {
        **{f"{key} of the model": getattr(model_config, key) for key in (*SIZES, "attention_bias", "mlp_bias")},
        **keys,
        "training.compile": not layout.use_cpu if compiled is None else compiled,
        "distributed.pp_keep_activations": layout.pp_keep_activations,
        "dataset.mask_documents": config.dataset.masks_documents,
        "environment.OMP_NUM_THREADS": config.environment.OMP_NUM_THREADS if layout.use_cpu else None,
        # With ZeRO-3, actions wait for weights; all other data parallelism runs between actions.
        "number of ranks that shard the weights": layout.dp_size * layout.cp_size if layout.dp_engine == "zero3" else 1,
        "stages": "|".join(map(str, stages)),
    }
