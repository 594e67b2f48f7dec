"""The jobs of a sweep before they run: their configs, checked, with estimates of memory, idle time and speed."""

import copy
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from picotron.config import Config, Schedule
from picotron.config import Model as ModelSection
from picotron.console import UserError
from picotron.model.families import differences
from workbench.console import text_table
from workbench.explain.hardware import USABLE, Hardware
from workbench.explain.measure import on_hardware
from workbench.explain.step_time import Forecast, forecast
from workbench.files import write_atomically
from workbench.pipelines.engine import check_layout
from workbench.pipelines.memory import GIB, Memory, bubble, rank_memory
from workbench.pipelines.plan import SchedulePlan
from workbench.run.config_reader import RawConfig, override, parse_config
from workbench.run.model_config import load_model_config
from workbench.run.with_keys import with_keys
from workbench.schedules.schedules import SCHEDULES
from workbench.sweep.combinations import AXES, FLAGS, GLOBAL_BATCH, Combination, canonical_json
from workbench.sweep.jobs import Job

NEED_MORE = ("afab", "looped_bfs", "dualpipev")  # more memory than 1f1b, interleaved_1f1b and zbv, and no less time
# Values that `--best` tries of keys that are not given; also numbers of chunks, see `with_chunks`.
OPTIONS: dict[str, list[Any]] = {
    "training.micro_batch_size": [1, 2, 4, 8],
    "training.activation_checkpointing": ["none", "selective", "full"],
    "distributed.dp_engine": ["bucket", "zero1", "zero3"],
    "distributed.pp_engine": [name for name in SCHEDULES if name not in NEED_MORE],
}


@dataclass(frozen=True)
class PlannedJob:
    """A job that can run.

    Args:
        data: the config as JSON, as it is written to the file.
        config: the config.
        memory: the estimated memory of each pp rank.
        bubble: the estimated idle fraction, 0 to 1.
        forecast: the estimated time of a step, if the hardware is known.
    """

    job: Job
    data: RawConfig
    config: Config
    memory: list[Memory]
    bubble: float
    forecast: Forecast | None

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(memory.total for memory in self.memory)

    def write_forecast(self) -> None:
        """Write the forecast next to the config; `extract_metrics.py` compares it with the run."""
        if self.forecast is not None:
            data = {
                "step_time": self.forecast.step_time,
                "tokens_per_second_per_gpu": self.forecast.tokens_per_second / self.config.distributed.world_size,
                "mfu": self.forecast.mfu,
                "memory_gb": self.peak / 1e9,
                "seconds": self.forecast.seconds._asdict(),
            }
            write_atomically(self.job.forecast_file, json.dumps(data, indent=2) + "\n")


def make_config(base: RawConfig, combination: Combination) -> tuple[RawConfig, Config]:
    """Return the config of a combination as JSON and as an object.

    Raises:
        UserError: see `parse_config`.
    """
    data = copy.deepcopy(base)
    for key, value in combination.items():
        if key != GLOBAL_BATCH:
            override(data, key, value)
    if GLOBAL_BATCH in combination:
        override(data, FLAGS["grad_acc_steps"], accumulation_steps(combination[GLOBAL_BATCH], parse_config(data)))
    return data, parse_config(data)


def with_ep_sizes(base: RawConfig, chosen: Sequence[Combination]) -> Iterator[Combination]:
    """Yield each combination of a model with experts with all values of ep_size that divide the experts and dp x cp."""
    for combination in chosen:
        experts, ranks = None, 1
        try:
            _, config = make_config(base, combination)
            model, ranks = load_cached(config.model), config.distributed.dp_size * config.distributed.cp_size
            experts = None if isinstance(model, UserError) else differences(model).experts
        except UserError:  # which `plan_job` reports
            pass
        if experts is None:
            yield combination
        else:
            shared = math.gcd(experts.number, ranks)
            axes = {key: combination[key] for key in AXES.values()}
            yield from (axes | {FLAGS["ep"]: n} | combination for n in range(1, shared + 1) if shared % n == 0)


def plan_job(job: Job, base: RawConfig, combination: Combination, hardware: Hardware | None) -> PlannedJob:
    """Make the config of a combination, check it as train.py does, and estimate its memory, bubble and speed.

    Raises:
        UserError: train.py would reject the config.
    """
    data, config = make_config(base, combination | {"checkpoint.save_dir": str(job.run_folder)})
    model_config, plan = check_cached(config)
    config = config if hardware is None else on_hardware(config, hardware)
    times = None if hardware is None else forecast(config, model_config, plan, hardware)
    idle = bubble(config, model_config, plan) if times is None else times.bubble
    return PlannedJob(job, data, config, rank_memory(config, model_config, plan), idle, times)


@functools.cache
def load_cached(section: ModelSection) -> PreTrainedConfig | UserError:
    """Load a model's config. An error is returned, and thus cached: an unreachable hub takes long to fail."""
    try:
        return load_model_config(section)
    except UserError as error:
        return error


def check_cached(config: Config) -> tuple[PreTrainedConfig, SchedulePlan]:
    """Do the same as `check_model`, but load each model's config only once."""
    model_config = load_cached(config.model)
    if isinstance(model_config, UserError):
        raise model_config
    return model_config, check_layout(config, model_config)


def accumulation_steps(global_batch_size: Any, config: Config) -> int:
    dp, mbs = config.distributed.dp_size, config.training.micro_batch_size
    if type(global_batch_size) is not int or global_batch_size < 1 or global_batch_size % (dp * mbs):
        raise UserError(
            f"global_batch_size={canonical_json(global_batch_size)} should be a positive multiple of {dp * mbs}, the "
            f"product of dp_size={dp} and micro_batch_size={mbs}"
        )
    return global_batch_size // (dp * mbs)


def candidates(base: RawConfig, layouts: Sequence[Combination]) -> Iterator[tuple[Combination, Config]]:
    """Extend layouts by the values in OPTIONS that make a difference, and drop those that train.py would reject."""
    for layout in layouts:
        dp, pp, cp, tp = (layout[FLAGS[axis]] for axis in ("dp", "pp", "cp", "tp"))
        options = {key: values for key, values in OPTIONS.items() if key not in layout}
        for key, ranks in (("distributed.dp_engine", dp * cp), ("distributed.pp_engine", pp)):
            if ranks == 1 and key in options:
                options[key] = options[key][:1]
        for values in itertools.product(*options.values()):
            combination = layout | dict(zip(options, values, strict=True))
            combination.setdefault("distributed.sequence_parallel", tp > 1)
            try:
                _, config = make_config(base, combination)
            except UserError:  # for example, the batch does not divide by dp
                continue
            for found in with_chunks(combination, config):
                if _can_run(found[1]):
                    yield found


def with_chunks(combination: Combination, config: Config) -> Iterator[tuple[Combination, Config]]:
    """Yield a config and, unless something says how many stages there are, the same one with other numbers of chunks:
    those with which a stage has 1, 2, 4, ... layers.
    """
    yield combination, config
    layout, model_config, key = config.distributed, load_cached(config.model), "schedule.pp_chunks"
    recipe = SCHEDULES.get(layout.pp_engine)
    fixed = key in combination or config.schedule.pp_chunks is not None or config.schedule.pp_layout is not None
    if layout.pp_size == 1 or recipe is None or not recipe.any_chunks or fixed or isinstance(model_config, UserError):
        return
    layers = model_config.num_hidden_layers
    sizes = (2**i for i in range(layers.bit_length()))
    counts = {min(layers // layout.pp_size, -(-layers // (layout.pp_size * size))) for size in sizes}
    for chunks in sorted(counts - {0, 1, recipe.chunks}):
        yield combination | {key: chunks}, with_keys(config, schedule={"pp_chunks": chunks})


def _can_run(config: Config) -> bool:
    """Return whether a layout fits its model. Only what that depends on is kept, because most candidates share it: the
    pipeline, without the axes that split a stage, and these axes without a pipeline.
    """
    layout = config.distributed
    from_file = layout.pp_engine.startswith("csv:")  # a file is for one number of micro-batches
    training: dict[str, Any] = {"micro_batch_size": 1} | ({} if from_file else {"gradient_accumulation_steps": 1})
    one = {"dp_size": 1, "dp_engine": "bucket"}
    parts = [({"schedule": config.schedule}, one)]
    if config.schedule.pp_recording is None:  # a recording is of one config
        training["activation_checkpointing"] = "none"
        without_pipeline = {"schedule": Schedule()}, one | {"pp_size": 1, "pp_engine": "1f1b"}
        parts = [without_pipeline, (parts[0][0], one | {"tp_size": 1, "cp_size": 1, "sequence_parallel": False})]
    without_lists = {"logging": {"trace_steps": None}, "dataset": {"mixture": None}}  # which have no hash
    configs = (
        with_keys(config, training=training, distributed=part, **without_lists).model_copy(update=schedule)
        for schedule, part in parts
    )
    return all(map(_fits, configs))


@functools.cache
def _fits(config: Config) -> bool:
    model_config = load_cached(config.model)
    if isinstance(model_config, UserError):
        raise model_config
    stages, section = config.distributed.pp_size, config.schedule
    if section.pp_layout is None and stages * (section.pp_chunks or 1) > model_config.num_hidden_layers:
        return False  # without building a very long pipeline first
    try:
        check_layout(config, model_config)
    except UserError:
        return False
    return True


def table(planned: Sequence[PlannedJob], brief: bool = False, gib: float | None = None) -> str:
    """Format the layout, batch, bubble and memory of each job; memory is that of the rank that needs most.

    Args:
        brief: whether to omit the layout, which is in the names of `--best`, and the size of a step, which is equal.
        gib: memory of a device, for a column with what is left of the part that a plan may use.
    """
    rows = []
    digits = 1 if min(p.peak for p in planned) > 4 * GIB else 3
    for p in planned:
        layout, training = p.config.distributed, p.config.training
        dp, mbs, steps = layout.dp_size, training.micro_batch_size, training.gradient_accumulation_steps
        heaviest = max(p.memory, key=lambda memory: memory.total)
        amounts = (heaviest.state, heaviest.total - heaviest.state, heaviest.total)
        row = {"": p.job.name}
        if not brief:
            row |= {
                "dp pp cp tp": f"{dp:2} {layout.pp_size:2} {layout.cp_size:2} {layout.tp_size:2}",
                "sequences/step": f"{p.config.global_batch_size} = {dp} x {mbs} x {steps}",
                "tokens/step": f"{p.config.global_batch_size * training.seq_length:,}",
            }
        row |= {
            "parameters/rank": f"{max(memory.parameters for memory in p.memory):,}",
            "bubble": f"{p.bubble:.1%}",
            "GiB/rank": "{} + {} = {}".format(*(f"{amount / GIB:.{digits}f}" for amount in amounts)),
        }
        if gib is not None:
            row["GiB left"] = f"{USABLE * gib - heaviest.total / GIB:.{digits}f}"
        if p.forecast is not None:
            mfu = "-" if p.forecast.mfu is None else f"{p.forecast.mfu:.1%}"
            row |= {"s/step": f"{p.forecast.step_time:.3f}", "tokens/s": p.forecast.rate, "MFU": mfu}
        rows.append(row)
    return text_table([[*rows[0]], *([*row.values()] for row in rows)])
