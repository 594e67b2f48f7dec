"""Search for the configs that fit into memory and, by `forecast`, are the fastest. No torch here."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from picotron.config import Config
from picotron.console import UserError
from picotron.explain.estimate import GIB, layer_saves, rank_memory, rank_parameters, state_bytes
from picotron.explain.forecast import Clock, forecast
from picotron.explain.hardware import Hardware, fits
from picotron.pipeline_parallel.plan import PipelinePlan, plan_pipeline
from picotron.pipeline_parallel.stages import Stage
from picotron.schedules.schedules import build
from picotron.schedules.simulate import Costs, simulate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IDLE = {"1f1b": 1.0, "interleaved_1f1b": 1 / 2, "zbv": 1 / 6}  # of (p - 1) times the work of a micro-batch
Values = dict[str, Any]  # of the keys that distinguish a config from others
Least = tuple[float, int, Values, Config | None]  # GiB, number and values of the config that needs least


def bounds(config: Config, model: "PreTrainedConfig", hardware: Hardware) -> tuple[float, float]:
    """Return lower bounds of the seconds and of the GiB, from the first pp rank, the average, and the idle time."""
    layout, m = config.distributed, config.training.gradient_accumulation_steps
    layers, pp, engine = model.num_hidden_layers, layout.pp_size, layout.pp_engine
    clock = Clock(config, model, hardware, kept=float(layout.pp_keep_activations > 0))  # at most all of them are kept
    idle = IDLE.get(engine, 0.0) if layout.pp_chunks is None else 0.0
    is_loop = pp == 1 or engine in ("afab", "1f1b", "looped_bfs", "interleaved_1f1b", "zb_h1")
    # In a V, the first rank also has the head, so another one may have more layers.
    whole, first = Stage(range(layers), True, True), Stage(range(layers // pp), is_loop)
    one = PipelinePlan(build("1f1b", 1, 1), [first])
    work = {(kind, 0): clock.work(first, kind) for kind in "FB"}
    timeline = simulate(one.schedule, Costs(measured={(key,): sum(each) for key, each in work.items()}))
    dp = clock.exposed_dp(one, timeline, work) * (m if layout.dp_engine == "zero3" and pp == 1 else 1)
    average = sum(sum(clock.work(whole, kind)) for kind in ("FIW" if engine == "zbv" else "FB")) / pp
    busiest = sum(sum(clock.work(Stage(range(-(-layers // pp))), kind)) for kind in "FB")
    pipeline = max(average * (m + idle * (pp - 1)), busiest * m)
    parameters, saved = rank_parameters(config, model, [first]), layer_saves(config, clock.s)
    memory = sum(state_bytes(config, clock.s, parameters)) + min(m, pp) * len(first.layers) * saved
    return pipeline + dp + clock.optimizer(parameters), memory / GIB


def best_configs(
    configs: Iterable[tuple[Values, Config]], model: "PreTrainedConfig", hardware: Hardware, gib: float, count: int
) -> tuple[list[Values], Least]:
    """Return the `count` fastest configs that fit into `gib`, best first, and the smallest. All pass all checks."""
    ordered = sorted(
        (*bounds(config, model, hardware), i, values, config) for i, (values, config) in enumerate(configs)
    )
    plans, best = dict[Any, PipelinePlan](), list[tuple[float, int, Values]]()  # plans by what they depend on
    least: Least = (float("inf"), -1, {}, None)
    for bound, memory, i, values, config in ordered:
        if len(best) == count and bound >= best[-1][0]:
            break  # no other config can be faster
        if fits(memory, gib):
            training = config.training
            pipeline = [value for name, value in config.distributed if name.startswith("pp_")]
            key = *pipeline, training.gradient_accumulation_steps, training.activation_checkpointing
            try:
                plans[key] = plan = plans.get(key) or plan_pipeline(config, model)
            except UserError:  # for example, too many forwards for a schedule
                continue
            memory = max(each.total for each in rank_memory(config, model, plan)) / GIB
        if fits(memory, gib):
            best = sorted([*best, (forecast(config, model, plan, hardware).step_time, i, values)])[:count]
        least = min(least, (memory, i, values, config))
    return [values for _, _, values in best], least
