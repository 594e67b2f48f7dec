"""The pipeline of a config: a schedule that it names, reads from a file or searches, and its stages. No torch."""

import dataclasses
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
    keys = {key: getattr(layout, key) for key in ("pp_engine", "pp_size", "pp_chunks", "pp_group_size")}
    keys["gradient_accumulation_steps"] = micro_batches
    try:
        schedule = build(layout.pp_engine, layout.pp_size, micro_batches, layout.pp_chunks, layout.pp_group_size)
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
        ("distributed.pp_chunks", schedule.chunks, chunks),
    ):
        if in_config not in (in_file, None):
            raise UserError(
                f"the schedule {path!r} is for {key}={in_file}, but the config has {in_config}; make them equal"
            )
    return schedule


def plan_pipeline(config: "Config", model_config: "PreTrainedConfig") -> SchedulePlan:
    """Choose the schedule and the stages of a config's pipeline."""
    layout = config.distributed
    if layout.pp_engine == "auto" and layout.pp_size > 1:
        from workbench.pipelines.auto import search_schedule  # other engines need none of it

        plan = search_schedule(config, model_config)
    else:
        schedule = training_schedule(config)
        plan = SchedulePlan(layout_stages(config, model_config, (schedule.chunks, schedule.placement)), schedule)
    return dataclasses.replace(plan, keep_activations=layout.pp_keep_activations)
