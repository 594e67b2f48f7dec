"""For each axis and remedy, a situation in which it pays, and the best layout without it:  python -m docs.programs.axes

Every row is the result of `create_config.py --best 1` on H100s: of all layouts, and of those without the axis.
"""

from typing import Any, NamedTuple

from picotron.command_line import load_config
from picotron.console import text_table
from picotron.explain.estimate import GIB, rank_memory
from picotron.explain.forecast import forecast
from picotron.explain.hardware import HARDWARE
from picotron.model.model_config import load_model_config
from picotron.parallelize import check_layout
from picotron.sweep.combinations import AXES, GLOBAL_BATCH, combinations
from picotron.sweep.planned_jobs import candidates, make_config
from picotron.sweep.planner import best_configs

ZERO, RECOMPUTATION = "distributed.dp_engine", "training.activation_checkpointing"
H100 = HARDWARE["H100"]


class Situation(NamedTuple):
    name: str
    model: str
    ranks: int
    batch: int  # sequences per step
    length: int
    without: dict[str, Any]  # the key that the row is about, with the value that does not use it


SITUATIONS = (
    Situation("dp", "docs/llama-3.2-1b", 8, 64, 4096, {AXES["dp"]: 1}),
    Situation("zero", "docs/llama-3.1-8b", 8, 64, 4096, {ZERO: "bucket"}),
    Situation("tp", "docs/llama-3.1-8b", 64, 16, 4096, {AXES["tp"]: 1}),
    Situation("cp", "docs/llama-3.1-8b", 64, 8, 131072, {AXES["cp"]: 1}),
    Situation("pp", "docs/llama-3.1-70b", 256, 64, 4096, {AXES["pp"]: 1}),
    Situation("recomputation", "docs/llama-3.1-70b", 32, 64, 8192, {RECOMPUTATION: "none"}),
)


def best(situation: Situation, restriction: dict[str, Any]) -> tuple[str, str, str]:
    """Return the best layout, its memory and its time, as text."""
    divisors = [n for n in range(1, situation.ranks + 1) if situation.ranks % n == 0]
    choices = {key: [restriction[key]] if key in restriction else divisors for key in AXES.values()}
    choices |= {key: [value] for key, value in restriction.items()} | {GLOBAL_BATCH: [situation.batch]}
    base: dict[str, Any] = load_config(["--config", "docs/seventy_billion.json"]).model_dump()
    base["distributed"] = {}
    base["model"]["name"], base["training"]["seq_length"] = situation.model, situation.length
    tried = list(candidates(base, combinations(choices, [situation.ranks], base)))
    model = load_model_config(tried[0][1].model)
    found, _ = best_configs(tried, model, H100, H100.gib, 1)
    if not found:
        return "nothing fits", "", ""
    _, config = make_config(base, found[0])
    plan, layout, training = check_layout(config, model), config.distributed, config.training
    memory = max(each.total for each in rank_memory(config, model, plan)) / GIB
    words = [f"{axis} {size}" for axis, key in AXES.items() if (size := getattr(layout, f"{key.split('.')[1]}")) > 1]
    words += [layout.dp_engine] * (layout.dp_engine != "bucket") + [layout.pp_engine] * (layout.pp_size > 1)
    words += ["recomputation"] * (training.activation_checkpointing == "full") + [f"B {training.micro_batch_size}"]
    return " ".join(words), f"{memory:.0f}", f"{forecast(config, model, plan, H100).step_time:.3g}"


def main() -> None:
    rows = [["", "model", "GPUs", "sequences", "best layout", "GiB", "s/step", "without", "GiB", "s/step"]]
    for each in SITUATIONS:
        sizes = [each.name, each.model.removeprefix("docs/"), f"{each.ranks}", f"{each.batch} x {each.length:,}"]
        rows.append([*sizes, *best(each, {}), *best(each, each.without)])
    print(text_table(rows))


if __name__ == "__main__":
    main()
