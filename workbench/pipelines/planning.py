"""The pipeline of a config: a schedule that it names, reads from a file or searches, and its stages. No torch."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron.console import UserError
from workbench.pipelines.plan import SchedulePlan, layout_stages
from workbench.schedules.actions import Schedule
from workbench.schedules.checker import check
from workbench.schedules.schedule_csv import read_csv
from workbench.schedules.schedules import build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config


def conflicts(config: "Config") -> Iterator[str]:
    """Yield a sentence for each conflict of a key of `schedule` with another key."""
    layout, schedule, recomputation = config.distributed, config.schedule, config.training.activation_checkpointing
    for key, value in vars(schedule).items():
        if layout.pp_size == 1 and value not in (None, 0, 1):  # of which none has an effect
            yield f"schedule.{key}={value!r} needs a pipeline, but pp_size=1; remove it"
    for key in ("pp_max_activations", "pp_recording"):
        value = getattr(schedule, key)
        if value is not None and layout.pp_engine != "auto":
            yield f"schedule.{key}={value!r} is for pp_engine='auto', not {layout.pp_engine!r}; remove it"
    if schedule.pp_group_size is not None and (layout.pp_engine == "auto" or layout.pp_engine.startswith("csv:")):
        yield (
            f"schedule.pp_group_size={schedule.pp_group_size} cannot be used with pp_engine={layout.pp_engine!r}; remove it"
        )
    if schedule.pp_keep_activations and recomputation != "full":
        yield (
            f"schedule.pp_keep_activations={schedule.pp_keep_activations} needs training.activation_checkpointing='full', "
            f"not {recomputation!r}, with which no whole layers are recomputed; remove one of them"
        )


def training_schedule(config: "Config") -> Schedule:
    """Return the schedule that a config names, checked. A pipeline of one rank has one stage, whatever pp_engine is.

    Raises:
        UserError: the schedule does not work with these numbers, or its CSV file has a fault or does not match them.
    """
    layout, section, micro_batches = config.distributed, config.schedule, config.training.gradient_accumulation_steps
    if layout.pp_size == 1:
        return build("1f1b", 1, micro_batches)
    if layout.pp_engine.startswith("csv:"):
        return _from_file(layout.pp_engine.removeprefix("csv:"), layout.pp_size, micro_batches, section.pp_chunks)
    keys: dict[str, object] = {"pp_engine": layout.pp_engine, "pp_size": layout.pp_size}
    keys |= {"pp_chunks": section.pp_chunks, "pp_group_size": section.pp_group_size}
    keys["gradient_accumulation_steps"] = micro_batches
    try:
        schedule = build(layout.pp_engine, layout.pp_size, micro_batches, section.pp_chunks, section.pp_group_size)
        check(schedule)
    except UserError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in keys.items() if value is not None)
        raise UserError(f"{given}: {error}") from None
    return schedule


def _from_file(path: str, pp: int, micro_batches: int, chunks: int | None) -> Schedule:
    schedule = read_csv(path)
    for key, in_file, in_config in (
        ("distributed.pp_size", schedule.pp, pp),
        ("training.gradient_accumulation_steps", schedule.micro_batches, micro_batches),
        ("schedule.pp_chunks", schedule.chunks, chunks),
    ):
        if in_config not in (in_file, None):
            raise UserError(
                f"the schedule {path!r} is for {key}={in_file}, but the config has {in_config}; make them equal"
            )
    return schedule


def plan_pipeline(config: "Config", model_config: "PreTrainedConfig") -> SchedulePlan:
    """Choose the schedule and the stages of a config's pipeline.

    Raises:
        UserError: see `conflicts`, `training_schedule` and `layout_stages`.
    """
    if problems := list(conflicts(config)):
        raise UserError(*problems)
    layout = config.distributed
    if layout.pp_engine == "auto" and layout.pp_size > 1:
        from workbench.pipelines.auto import search_schedule  # other engines need none of it

        plan = search_schedule(config, model_config)
    else:
        schedule = training_schedule(config)
        plan = SchedulePlan(layout_stages(config, model_config, (schedule.chunks, schedule.placement)), schedule)
    return dataclasses.replace(plan, keep_activations=config.schedule.pp_keep_activations)
