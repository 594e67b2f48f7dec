"""Errors of the forecast of a step's time, on runs that others have published.

    python -m benchmarks.forecast
    python -m benchmarks.forecast --held_out

prints a row for each run, worst first, and a summary of each kind of layout. The last table compares layouts of one
model on one number of GPUs; its regret is the price of the forecast's choice among them.

Prices may be chosen with the runs for calibration; all others are held out. Only two of the runs are picotron's: other
programs differ from it in what they overlap and fuse. Products in float8 are forecast as products in bfloat16, so
no summary contains their runs.
"""

import argparse
import dataclasses
import json
from itertools import combinations, groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from transformers import LlamaConfig

from picotron.config import Config
from picotron.model.families import model_cost
from workbench.console import text_table
from workbench.explain.forecast_errors import ERRORS, Errors, gpus, kinds_of
from workbench.explain.hardware import HARDWARE
from workbench.explain.step_time import Clock, Forecast, forecast
from workbench.pipelines.engine import plan_pipeline
from workbench.run.config_reader import parse_config
from workbench.run.metrics import PEAK_BF16_FLOPS

RUNS = Path(__file__).with_name("published.json")
LAYOUTS = Path(__file__).with_name("layouts.json")  # many layouts of one model on one number of GPUs
ENGINES = {0: "bucket", 1: "zero1", 3: "zero3"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A run with its measured and its forecast time of a step, in seconds."""

    source: str
    run: dict[str, Any]
    kinds: list[str]
    measured: float
    forecast: Forecast

    @property
    def error(self) -> float:
        return self.forecast.step_time / self.measured - 1

    @property
    def layout(self) -> str:
        run = self.run
        return " ".join(f"{axis} {run[axis]}" for axis in ("dp", "pp", "cp", "tp") if axis in run)

    @property
    def choice(self) -> str:
        """What `--best` chooses: the layout, the size of a micro-batch, and sequence parallelism."""
        return f"{self.layout} mbs {self.run['micro_batch_size']}{' sp' * self.run.get('sequence_parallel', False)}"


def shape(model: dict[str, Any], tp: int) -> LlamaConfig:
    """Return a Llama of the same shape. An MLP with GELU has two matrices instead of three, which are larger."""
    model = dict(model)
    if model.pop("mlp") == "gelu":
        model["intermediate_size"] = 2 * model["intermediate_size"] // (3 * tp) * tp
    return LlamaConfig(**model)


def config_of(run: dict[str, Any], source: dict[str, Any], fused: bool, recomputed: str = "none") -> Config:
    """Return the config of a run. Programs of 2022 and before had no fused attention."""
    tp = run["tp"]
    return parse_config(
        {
            "distributed": {
                **{f"{axis}_size": run[axis] for axis in ("dp", "pp", "cp", "tp") if axis in run},
                **{key: run[key] for key in ("pp_engine", "pp_chunks", "pp_layout", "cp_engine") if key in run},
                "sequence_parallel": run.get("sequence_parallel", False) and tp > 1,
                "dp_engine": ENGINES[run.get("zero", 0)],
                "use_cpu": False,
            },
            "model": {"name": run["model"], "use_flash_attention": fused, "dtype": "bfloat16"},
            "training": {
                "seq_length": run.get("seq_length", source["seq_length"]),
                "micro_batch_size": run["micro_batch_size"],
                "gradient_accumulation_steps": run["micro_batches"],
                "activation_checkpointing": run.get("activation_checkpointing", recomputed),
                "compile": run.get("compiled", source.get("compiled", True)),
            },
            "dataset": {"name": "published"},
        }
    )


def measured_seconds(run: dict[str, Any], config: Config, model: LlamaConfig, hardware: str) -> float:
    """Return the measured time of a step, from what the source gives."""
    T, world = config.training.seq_length, config.distributed.world_size
    tokens = config.global_batch_size * T
    if "seconds" in run:
        return run["seconds"]
    if "samples_per_second_per_gpu" in run:
        return config.global_batch_size / run["samples_per_second_per_gpu"] / world
    if "tokens_per_second_per_gpu" in run:
        return tokens / run["tokens_per_second_per_gpu"] / world
    flops = model_cost(model, T).flops * tokens
    if "hfu" in run:  # with recomputation: Narayanan et al. 2021, equation 3
        L, D, V = model.num_hidden_layers, model.hidden_size, model.vocab_size
        flops = 96 * tokens * L * D**2 * (1 + T / (6 * D) + V / (16 * L * D))
    return flops / (run.get("mfu") or run["hfu"]) / PEAK_BF16_FLOPS[hardware] / world


def estimate(run: dict[str, Any], source: dict[str, Any], model: LlamaConfig, fused: bool) -> Forecast:
    """Forecast a run, and add the time of recomputing a fraction of the layers or only attention, where it does so.

    A source may name bytes that its program moves in each micro-batch in addition to picotron's, for each parameter and
    for each number of a layer's input.
    """
    config, hardware = config_of(run, source, fused), HARDWARE[source["hardware"]]
    memory = hardware.memory * source.get("memory", 1)  # of another variant
    hardware = dataclasses.replace(hardware, memory=memory, node=source.get("node", hardware.node))
    plan = plan_pipeline(config, model)
    found = forecast(config, model, plan, hardware)
    clock, moved = Clock(config, model, hardware), source.get("moved", {"parameter": 0, "input": 0})
    micro_batches = config.training.gradient_accumulation_steps / (1 - found.bubble)
    layers = model.num_hidden_layers / run["pp"]
    parameters = max(clock.parameters(list(plan.stages_of(rank).values())) for rank in range(run["pp"]))
    inputs = layers * clock.s.tokens * clock.s.shard
    added = micro_batches * hardware.move(moved["parameter"] * parameters + moved["input"] * inputs)
    if run.get("recomputed") == "attention":
        added += micro_batches * layers * clock.attention[0]
    elif "recomputed" in run:
        full = forecast(config_of(run, source, fused, "full"), model, plan, hardware)
        added += run["recomputed"] * (full.step_time - found.step_time)
    seconds = found.seconds._replace(compute=found.seconds.compute + added)
    return found._replace(seconds=seconds, step_time=found.step_time + added)


def rows(file: Path = RUNS) -> list[Row]:
    """Forecast all runs of a file."""
    data, found = json.loads(file.read_text()), []
    for source in data["sources"]:
        for run in source["runs"]:
            spec = data["models"][run["model"]]
            model, fused = shape(spec, run["tp"]), source.get("fused", spec["mlp"] == "swiglu")
            config = config_of(run, source, fused)
            measured = measured_seconds(run, config, model, source["hardware"])
            kinds = kinds_of(config) + ["parts"] * ("recomputed" in run)
            kinds.append(gpus(source["hardware"], config.distributed.world_size))
            found.append(Row(source["title"], run, kinds, measured, estimate(run, source, model, fused)))
    return found


def comparable(found: list[Row]) -> list[Row]:
    return [row for row in found if not row.run.get("float8")]


def by_kind(found: list[Row]) -> dict[str, Errors]:
    """Return the errors of each kind of layout. A run counts for all of its kinds. The median is that of the runs that
    are held out, if there are some.
    """
    result = {}
    for kind in dict.fromkeys([*ERRORS, *(kind for row in found for kind in row.kinds)]):
        if rows_of := [row for row in comparable(found) if kind in row.kinds]:
            errors = [row.error for row in rows_of]
            held_out = [row.error for row in rows_of if not row.run["calibration"]]
            result[kind] = Errors(len(errors), median(map(abs, held_out or errors)), min(errors), max(errors))
    return result


def kinds_table(found: list[Row]) -> str:
    """Format the errors of each kind of layout."""
    lines = [["kind", "for calibration", "runs", "median error", "too fast by", "too slow by"]]
    for calibration in (False, True):
        for kind, each in by_kind([row for row in found if row.run["calibration"] == calibration]).items():
            lines.append(
                [kind, "yes" if calibration else "no", str(each.runs), f"{each.median:.1%}",
                 f"{max(0, -each.lowest):.1%}", f"{max(0, each.highest):.1%}"]
            )  # fmt: skip
    return text_table(lines, first_number=2)


def regret_table(found: list[Row]) -> str:
    """Format the regret for each model on a number of GPUs: how much longer a step takes with the layout that the
    forecast puts first than with the fastest one, both as measured.
    """
    lines = [
        ["model", "for calibration", "fastest layout", "the forecast's choice", "layouts", "pairs in order",
         "median error", "regret"]
    ]  # fmt: skip
    found = sorted(found, key=lambda row: (row.run["calibration"], row.run["name"]))
    for calibration, half in groupby(found, key=lambda row: row.run["calibration"]):
        regrets, answer = [], "yes" if calibration else "no"
        for name, group in groupby(half, key=lambda row: row.run["name"]):
            rows_of = list(group)
            fastest = min(rows_of, key=lambda row: row.measured)
            choice = min(rows_of, key=lambda row: row.forecast.step_time)
            regrets.append(choice.measured / fastest.measured - 1)
            pairs = [
                (a.measured < b.measured) == (a.forecast.step_time < b.forecast.step_time)
                for a, b in combinations(rows_of, 2)
            ]
            lines.append(
                [name, answer, fastest.choice, choice.choice, str(len(rows_of)), f"{mean(pairs):.0%}",
                 f"{median(abs(row.error) for row in rows_of):.1%}", f"{regrets[-1]:.1%}"]
            )  # fmt: skip
        for name, value in (("mean", mean(regrets)), ("worst", max(regrets))):
            lines.append([name, answer, "", "", "", "", "", f"{value:.1%}"])
    return text_table(lines, first_number=4)


def table(found: list[Row]) -> str:
    lines = [["source", "run", "layout", "measured, s", "forecast, s", "error", "largest part", "reason"]]
    for row in sorted(found, key=lambda row: -abs(row.error)):
        parts = {name: each for name, each in row.forecast.seconds._asdict().items() if name != "compute"}
        largest = max(parts, key=parts.__getitem__)
        share = f"{largest} {parts[largest] / row.forecast.step_time:.0%}"
        lines.append(
            [row.source, row.run["name"], row.layout, f"{row.measured:.3f}", f"{row.forecast.step_time:.3f}",
             f"{row.error:+.1%}", share, row.run.get("reason", "")]
        )  # fmt: skip
    return text_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held_out", action="store_true", help="leave out the runs used for calibration")
    options = parser.parse_args()
    found, layouts = (
        [row for row in rows(file) if not (options.held_out and row.run["calibration"])] for file in (RUNS, LAYOUTS)
    )
    print(f"{table(found)}\n\n{kinds_table(found)}\n\n{regret_table(layouts)}")


if __name__ == "__main__":
    main()
