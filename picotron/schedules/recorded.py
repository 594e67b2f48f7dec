"""The times of a recorded step, to simulate and to search schedules with."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from picotron.errors import UserError
from picotron.schedules.actions import Schedule
from picotron.schedules.schedule_csv import assemble
from picotron.schedules.simulate import Costs, Timeline, measured_costs
from picotron.schedules.stages import Stage
from picotron.schedules.trace import read_settings, read_trace

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from picotron.config import Config

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


def check_recording(run_dir: str, settings: dict[str, Any]) -> None:
    """Raise a UserError unless the newest recorded step of a run has these settings, see `settings_of`."""
    recorded = read_settings(run_dir)
    different = [
        f"{key}={recorded.get(key)!r}, not {value!r}" for key, value in settings.items() if recorded.get(key) != value
    ]
    if different:
        raise UserError(
            f"the run in pp_costs={run_dir!r} was recorded with {'; '.join(different)}; record a run with the settings of "
            f"this config, or remove pp_costs"
        )


def recorded_costs(run_dir: str | Path, step: int | None = None) -> tuple[Schedule, Costs]:
    """Return the schedule of a recorded step, and the times of all kinds of actions in its stages, in seconds.

    If the recorded schedule splits no backward of a stage, each half is estimated to take half as long as the full one.

    Args:
        step: number of the recorded step, by default the newest.

    Raises:
        UserError: there is no such step, or its trace cannot be read or is incomplete.
    """
    step, timeline = read_trace(run_dir, step)
    return timeline_costs(timeline, f"of step {step} in {str(run_dir)!r}")


def timeline_costs(timeline: Timeline, name: str) -> tuple[Schedule, Costs]:
    """Return the schedule and the times of a recorded timeline, see `recorded_costs`."""
    schedule = assemble(timeline.programs, name)
    times = dict(measured_costs(timeline).measured)
    for stage in range(schedule.num_stages):
        full, i, w = ((kind, stage) for kind in "BIW")
        if (i,) in times:
            times.setdefault((full,), times[i,] + times[w,])
        # The last backward of a stage is in no pair, because no forward is left. So there is an I or a B.
        times.setdefault((i,), times[full,] / 2)
        times.setdefault((w,), times[full,] / 2)
    return schedule, dataclasses.replace(Costs(measured=times), p2p=message_time(schedule, timeline))


def message_time(schedule: Schedule, timeline: Timeline) -> float:
    """Estimate the time of a message: the shortest time from the end of an action to the start of one on another rank
    that needs its result, which often waits for the message.

    The clocks of two ranks differ a little, which prolongs messages in one direction and shortens those in the other.
    So the estimate for a pair of ranks is the mean over both directions. Of several pairs, the result is the median.
    """
    ends = {
        part.result: (rank, s.end)
        for rank, spans in enumerate(timeline.spans)
        for s in spans
        for part in s.action.parts
    }
    shortest: dict[tuple[int, int], float] = {}
    for rank, span in ((rank, span) for rank, spans in enumerate(timeline.spans) for span in spans):
        for source in filter(None, map(schedule.source, span.action.parts)):
            sender, end = ends[source]
            if sender != rank:
                shortest[sender, rank] = min(shortest.get((sender, rank), span.start - end), span.start - end)
    pairs = [(a, b) for a, b in itertools.combinations(range(schedule.pp), 2) if {(a, b), (b, a)} <= shortest.keys()]
    return max(0.0, median_low([(shortest[a, b] + shortest[b, a]) / 2 for a, b in pairs] or [0.0]))
