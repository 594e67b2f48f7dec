"""Search for the configs that fit into memory and, by `forecast`, are the fastest. No torch here."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from picotron.config import Config
from picotron.explain.estimate import GIB, layer_saves, rank_memory, rank_parameters, state_bytes
from picotron.explain.forecast import Clock, forecast
from picotron.hardware import Hardware
from picotron.schedules.plan import plan_pipeline
from picotron.schedules.stages import Stage

if TYPE_CHECKING:
    from transformers import LlamaConfig

IDLE = {"1f1b": 1.0, "interleaved_1f1b": 1 / 2, "zbv": 1 / 6}  # of (p - 1) times the work of a micro-batch
Values = dict[str, Any]  # of the keys that distinguish a config from others
Least = tuple[float, int, Values, Config | None]  # GiB of the config that needs least, its number and values


def bounds(config: Config, model: "LlamaConfig", hardware: Hardware) -> tuple[float, float]:
    """Return lower bounds of the seconds, for an average pp rank, and of the GiB, for the first one."""
    clock, layout, m = Clock(config, model, hardware), config.distributed, config.training.gradient_accumulation_steps
    layers, pp = model.num_hidden_layers, layout.pp_size
    whole, first = Stage(range(layers), True, True), Stage(range(layers // pp), True)
    seconds = (sum(clock.work(whole, "F")) + sum(clock.work(whole, "B"))) / pp
    state = sum(state_bytes(config, clock.s, rank_parameters(config, model, [first])))
    saved = min(m, pp) * len(first.layers) * layer_saves(config, clock.s)
    return seconds * (m + IDLE.get(layout.pp_engine, 0.0) * (pp - 1)), (state + saved) / GIB


def best_configs(
    configs: Iterable[tuple[Values, Config]], model: "LlamaConfig", hardware: Hardware, gib: float, count: int
) -> tuple[list[Values], Least]:
    """Return the `count` fastest configs that fit into `gib`, best first, and of all evaluated ones the smallest.

    Args:
        configs: configs that pass all checks, for batches of the same size.
    """
    ordered = sorted(
        (*bounds(config, model, hardware), i, values, config) for i, (values, config) in enumerate(configs)
    )
    plans: dict[Any, Any] = {}  # by what they depend on
    best: list[tuple[float, int, Values]] = []
    least: Least = (float("inf"), -1, {}, None)
    for bound, memory, i, values, config in ordered:
        if len(best) == count and bound >= best[-1][0]:
            break  # no other config can be faster
        if memory <= gib:
            layout = config.distributed
            key = layout.pp_size, layout.pp_engine, layout.pp_chunks, config.training.gradient_accumulation_steps
            plans[key] = plan = plans.get(key) or plan_pipeline(config, model)
            memory = max(each.total for each in rank_memory(config, model, plan)) / GIB
        if memory <= gib:
            best = sorted([*best, (forecast(config, model, plan, hardware).step_time, i, values)])[:count]
        least = min(least, (memory, i, values, config))
    return [values for _, _, values in best], least
