"""Search for the configs that fit into memory and, by `forecast`, are the fastest. No torch here.

Most configs are left out by lower bounds of their time and their memory, which follow from their stages without a
schedule. A bound never exceeds the value of the config (see test_planner.py), so the search finds what an evaluation of
all configs would find.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from picotron.config import Config
from picotron.console import UserError
from picotron.pipeline_parallel.stages import Stage
from workbench.explain.hardware import Hardware, fits
from workbench.explain.step_time import Clock, Work, forecast
from workbench.pipelines.auto import deferred_fraction
from workbench.pipelines.memory import GIB, rank_memory, stage_bytes, state_bytes
from workbench.pipelines.plan import SchedulePlan, layout_stages
from workbench.pipelines.planning import plan_pipeline
from workbench.schedules.actions import Placement, rank_of
from workbench.schedules.schedules import SCHEDULES, action_kinds

NO_PART_OF_WORK = ("dp_size", "dp_engine", "gradient_accumulation_steps")  # with pp_*: keys on which no action depends
ROUNDING = 1e-9
Values = dict[str, Any]  # of the keys that distinguish a config from others


class Candidate(NamedTuple):
    """A config with lower bounds of its seconds and of its GiB."""

    seconds: float
    gib: float
    number: int
    values: Values
    config: Config


class Placed(NamedTuple):
    """The stages of each rank. Their layers are numbered from 0, so that stages that cost the same are equal."""

    held: list[tuple[Stage, ...]]
    placement: Placement


class Planner:
    """Evaluates configs of one model on some hardware. Plans and stages are kept by what they depend on."""

    def __init__(self, model: PreTrainedConfig, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware
        self.plans: dict[Any, SchedulePlan | None] = {}
        self.placed: dict[Any, Placed] = {}
        self.works: dict[Any, dict[tuple[int, bool, bool, str], Work]] = {}

    def plan(self, config: Config) -> SchedulePlan | None:
        """Return the plan of a config; None if it has none, for example if a schedule has too many forwards."""
        training, layout = config.training, config.distributed
        key: tuple[Any, ...] = layout.pp_size, layout.pp_engine, config.schedule
        key = *key, training.gradient_accumulation_steps, training.activation_checkpointing, training.seq_length
        if layout.pp_engine == "auto":
            key = *key, deferred_fraction(config, self.model)
        if config.schedule.pp_recording is not None:
            key = *key, config.model_dump_json()  # it must be that of the recording, see `settings_of`
        if key not in self.plans:
            try:
                self.plans[key] = plan_pipeline(config, self.model)
            except UserError:
                self.plans[key] = None
        return self.plans[key]

    def clock(self, config: Config, kept: float) -> Clock:
        """Return a clock that shares its times with those of all configs whose actions take the same."""
        clock = Clock(config, self.model, self.hardware, kept)
        keys = (pair for section in (config.model, config.training, config.distributed) for pair in section)
        key = *(v for k, v in keys if k not in NO_PART_OF_WORK and not k.startswith("pp_")), kept
        clock.works = self.works.setdefault(key, clock.works)
        return clock

    def gib(self, config: Config, plan: SchedulePlan) -> float:
        """Return the memory of the rank that needs most."""
        return max(each.total for each in rank_memory(config, self.model, plan)) / GIB

    def bounds(self, config: Config) -> tuple[float, float]:
        """Return lower bounds of the seconds of a step, and of the GiB of the rank that needs most."""
        layout, m = config.distributed, config.training.gradient_accumulation_steps
        # With pp_keep_activations, work is least if all micro-batches keep them.
        clock = self.clock(config, kept=1.0 if config.schedule.pp_keep_activations else 0.0)
        if layout.pp_size > 1 and layout.pp_engine not in SCHEDULES:  # the stages are not known yet
            return self._average(clock, m)
        placed = self.place(config)
        distinct = dict.fromkeys(placed.held)
        parameters = [clock.parameters(stages) for stages in distinct]
        seconds = self._pipeline(clock, placed, m)  # messages over dp can only add to it
        # One micro-batch in all stages of a rank; and in a loop, on the first rank, one in each stage of each rank.
        saves = {stage: stage_bytes(config, self.model, clock.s, stage) for stage in {*chain(*distinct)}}
        saved = [[saves[stage] for stage in stages] for stages in distinct]
        activations = [sum(each) for each in saved]
        if placed.placement == "loop":
            activations[0] = max(activations[0], len(saved[0]) * min(m, layout.pp_size) * min(saved[0]))
        needed = [self._held(clock, *each) for each in zip(parameters, activations, strict=True)]
        return seconds + clock.optimizer(max(parameters)), max(needed) / GIB

    def place(self, config: Config) -> Placed:
        """Place the stages of a hand-made schedule, the only one of one rank being 1F1B."""
        layout = config.distributed
        recipe = SCHEDULES[layout.pp_engine if layout.pp_size > 1 else "1f1b"]
        chunks = config.schedule.pp_chunks if config.schedule.pp_chunks and recipe.any_chunks else recipe.chunks
        key = config.schedule.pp_layout, layout.pp_size, chunks, recipe.placement, config.training.seq_length
        if key not in self.placed:
            stages = layout_stages(config, self.model, (chunks, recipe.placement))
            held: list[list[Stage]] = [[] for _ in range(layout.pp_size)]
            for i, each in enumerate(stages):
                stage = Stage(range(len(each.layers)), each.has_embedding, each.has_head)
                held[rank_of(i, layout.pp_size, recipe.placement)].append(stage)
            self.placed[key] = Placed([*map(tuple, held)], recipe.placement)
        return self.placed[key]

    def _average(self, clock: Clock, m: int) -> tuple[float, float]:
        """Bounds without stages: what an average rank computes and holds."""
        pp, whole = clock.layout.pp_size, Stage(range(self.model.num_hidden_layers), True, True)
        parameters = clock.parameters([whole]) // pp
        F, B, split = (sum(sum(clock.work(whole, kind)) for kind in kinds) for kinds in ("F", "B", "IW"))
        saved = stage_bytes(clock.config, self.model, clock.s, whole) / pp
        seconds = m / pp * (F + min(B, split)) + clock.optimizer(parameters)
        return seconds, self._held(clock, parameters, saved) / GIB

    def _held(self, clock: Clock, parameters: int, activations: float) -> float:
        """Bytes of a rank without temporary tensors."""
        gathered = clock.layout.dp_engine == "zero3" and clock.layout.pp_size > 1
        return (
            sum(state_bytes(clock.config, clock.s, parameters)) + gathered * parameters * clock.s.number + activations
        )

    def _pipeline(self, clock: Clock, placed: Placed, m: int) -> float:
        """A bound of the simulated step: a rank waits until a forward reaches its first stage, and works. If its last
        action can only be a full backward, the gradients have to return to the first stage.
        """
        kinds = action_kinds(clock.layout.pp_engine if clock.layout.pp_size > 1 else "1f1b")
        split, work, ways = "I" in kinds, dict[Stage, float](), dict[Stage, tuple[float, float]]()
        for stage in {*chain(*placed.held)}:
            F, B, IW = (sum(sum(clock.work(stage, kind)) for kind in each) for each in ("F", "B", "IW"))
            work[stage] = F + (B if not split else min(B, IW) if "B" in kinds else IW)
            ways[stage] = F + clock.message, 0.0 if split else B + clock.message
        busy = {held: m * sum(work[stage] for stage in held) for held in {*placed.held}}
        longest = arrival = way_back = 0.0
        for held in placed.held:
            longest = max(longest, arrival + busy[held] + way_back)
            there, back = ways[held[0]]
            arrival, way_back = arrival + there, way_back + back
        return longest


def best_configs(
    configs: Iterable[tuple[Values, Config]], model: PreTrainedConfig, hardware: Hardware, gib: float, count: int
) -> tuple[list[Values], Candidate]:
    """Return the fastest configs of the `count` fastest layouts that fit into `gib`, one of each, best first, and the
    config with the least bound of its memory. Layouts differ in the sizes of their axes, or in the pipeline's schedule.

    Args:
        configs: configs that pass all checks, with the values that distinguish them.
    """
    planner, best = Planner(model, hardware), dict[Any, tuple[float, int, Values]]()
    ordered = sorted(
        Candidate(*planner.bounds(config), i, values, config) for i, (values, config) in enumerate(configs)
    )
    for each in ordered:
        key, least_seconds = layout_of(each.config), each.seconds * (1 - ROUNDING)
        if len(best) == count and least_seconds > max(best.values())[0]:
            break  # no other config can be faster
        if (key in best and least_seconds > best[key][0]) or not fits(each.gib * (1 - ROUNDING), gib):
            continue
        if (plan := planner.plan(each.config)) is not None and fits(planner.gib(each.config, plan), gib):
            found = forecast(each.config, model, plan, hardware).step_time, each.number, each.values
            best[key] = min(best.get(key, found), found)
            best = dict(sorted(best.items(), key=lambda item: item[1])[:count])
    return [values for _, _, values in best.values()], min(ordered, key=lambda each: each.gib)


def layout_of(config: Config) -> tuple[Any, ...]:
    """Return the sizes of the axes and the schedule of a config."""
    layout = config.distributed
    engine = layout.pp_engine if layout.pp_size > 1 else None
    return layout.dp_size, layout.pp_size, layout.cp_size, layout.tp_size, engine
