"""The schedule of `pp_engine: auto`: a search with the times of a recorded run, or with estimated ones. No torch."""

import dataclasses
from typing import TYPE_CHECKING

from picotron.console import UserError
from picotron.pipeline_parallel.stages import Stage
from workbench.pipelines.layouts import count_stages, stage_weights
from workbench.pipelines.memory import deferred_bytes, layer_saves, sizes
from workbench.pipelines.plan import SchedulePlan, layout_stages, settings_of
from workbench.schedules.search import Found, Shape, fastest_schedule, shapes
from workbench.schedules.simulate import Costs, simulate, summary
from workbench.schedules.trace import check_recording, recorded_costs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config

ESTIMATED_MESSAGE = 0.02  # in forwards of a micro-batch on a rank; an assumption, where nothing is measured


def search_schedule(config: "Config", model_config: "PreTrainedConfig") -> SchedulePlan:
    """Find the fastest schedule for the times of a recorded run, or for times that are estimated by FLOPs.

    Raises:
        UserError: the recorded run does not match the config, or the stages do not fit the model.
    """
    layout = config.distributed
    memory = layout.pp_size if config.schedule.pp_max_activations is None else config.schedule.pp_max_activations
    if config.schedule.pp_recording is None:
        found, source, unit = _search_with_estimates(config, model_config, memory), "estimated by FLOPs", "forwards"
    else:
        found, source, unit = (
            _search_with_recording(config, model_config, memory),
            f"measured in {config.schedule.pp_recording!r}",
            "s",
        )
    schedule = found.schedule
    deferred = deferred_fraction(config, model_config)
    facts = summary(dataclasses.replace(simulate(schedule, found.costs), deferred=deferred))
    expectation = (
        f"schedule: {found.name} with {schedule.chunks} chunk(s) per pp rank, {schedule.placement} placement; expected, "
        f"with times {source}: step time {facts.pop('step time')} {unit} ({found.quality}), "
        f"{', '.join(f'{name} {value}' for name, value in facts.items())} (limit {memory:g})"
    )
    stages = layout_stages(config, model_config, (schedule.chunks, schedule.placement))
    return SchedulePlan(stages, schedule, expectation=expectation)


def _search_with_estimates(config: "Config", model_config: "PreTrainedConfig", memory: float) -> Found:
    """Search with estimated times, in forwards of a micro-batch on an average rank: I and W take 1, an I that
    recomputes activations takes 2, and a message `ESTIMATED_MESSAGE`.
    """
    layout, training = config.distributed, config.training
    recompute = training.activation_checkpointing == "full"

    def costs_of(shape: Shape) -> Costs:
        stages = layout_stages(config, model_config, shape)
        weights = stage_weights(model_config, stages, training.seq_length, layout.pp_size)
        return Costs(B=2.0 + recompute, I=1.0 + recompute, weights=weights, p2p=ESTIMATED_MESSAGE)

    chunks = config.schedule.pp_chunks
    if chunks is None and config.schedule.pp_layout is not None:
        chunks = max(1, count_stages(config.schedule.pp_layout) // layout.pp_size)
    elif chunks is None and model_config.num_hidden_layers < 2 * layout.pp_size:
        chunks = 1
    options, deferred = {shape: costs_of(shape) for shape in shapes(chunks)}, deferred_fraction(config, model_config)
    return fastest_schedule(layout.pp_size, training.gradient_accumulation_steps, memory, options, deferred)


def _search_with_recording(config: "Config", model_config: "PreTrainedConfig", memory: float) -> Found:
    layout = config.distributed
    assert config.schedule.pp_recording is not None
    recorded, costs = recorded_costs(config.schedule.pp_recording)
    for key, ours, theirs in (
        ("pp_size", layout.pp_size, recorded.pp),
        ("pp_chunks", config.schedule.pp_chunks, recorded.chunks),
    ):
        if ours not in (theirs, None):
            raise UserError(
                f"the run in pp_recording={config.schedule.pp_recording!r} has {key}={theirs}, but the config has {ours}; make them equal"
            )
    shape = recorded.chunks, recorded.placement
    check_recording(
        config.schedule.pp_recording, settings_of(config, model_config, layout_stages(config, model_config, shape))
    )
    micro_batches, deferred = config.training.gradient_accumulation_steps, deferred_fraction(config, model_config)
    return fastest_schedule(layout.pp_size, micro_batches, memory, {shape: costs}, deferred)


def deferred_fraction(config: "Config", model_config: "PreTrainedConfig") -> float:
    """Return the activations that a layer keeps between I and W, as a fraction of those that its forward keeps.

    With `activation_checkpointing` "none", both are about as large; with the other values, W needs more than the part
    that forward keeps.
    """
    if config.training.activation_checkpointing == "none":
        return 1.0
    s = sizes(config, model_config)
    return deferred_bytes(s, Stage(range(1))) / layer_saves(config, s)
