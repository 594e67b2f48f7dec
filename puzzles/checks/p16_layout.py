"""Check of puzzle 16: a config that the trainer accepts, its memory and the time of its step, by the formulas. The best
known layout is the solution, which the tests compare with a search of all layouts.
"""

from types import ModuleType
from typing import Any

from docs.programs.svg import TENSORS
from picotron.config import Config, Distributed, Training
from picotron.console import UserError
from puzzles.group import Group
from puzzles.pictures import Cell, rows
from puzzles.report import Report, Score, kind
from puzzles.solutions.p16_layout import layout
from workbench.drawing.draw_svg import COLOURS
from workbench.explain.hardware import HARDWARE, fits, usable
from workbench.explain.memory import GIB, Memory, rank_memory
from workbench.explain.step_time import Forecast, forecast
from workbench.pipelines.engine import check_layout
from workbench.run.config_reader import load_config
from workbench.run.model_config import load_model_config

GPU = HARDWARE["H100"]
MODEL, GPUS, SEQUENCES, TOKENS = "docs/llama-3.1-8b", 64, 32, 131_072
GIVEN = {  # the layout of the statement
    "dp_size": 8,
    "tp_size": 8,
    "sequence_parallel": True,
    "activation_checkpointing": "full",
    "gradient_accumulation_steps": 4,
}
PAR = 0.78  # of the time of GIVEN


def config_of(settings: dict[str, Any]) -> Config:
    """Return a config of the model with these settings.

    Raises:
        UserError: a key or a value is wrong.
    """
    options = ["--config", "docs/seventy_billion.json", "--model.name", MODEL]
    defaults = {"dp_size": 1, "pp_size": 1, "tp_size": 1, "sequence_parallel": False, "dp_engine": "bucket"}
    defaults |= {"pp_engine": "1f1b", "gradient_accumulation_steps": 1, "seq_length": TOKENS}
    for key, value in (defaults | settings).items():
        section = next((s for s in (Distributed, Training) if key in s.model_fields), None)
        if section is None:
            raise UserError(f"there is no key {key!r} in the sections distributed and training of the config")
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        options += [f"--{section.__name__.lower()}.{key}", text]
    return load_config(options)


def estimate(config: Config) -> tuple[list[Memory], Forecast]:
    """Return the memory of each pp rank, and the forecast of a step. Raises UserError."""
    model = load_model_config(config.model)
    plan = check_layout(config, model)
    return rank_memory(config, model, plan), forecast(config, model, plan, GPU)


def check(learner: ModuleType, group: Group, report: Report) -> None:
    settings = learner.layout()
    group.require(isinstance(settings, dict), f"expected a dictionary, got {kind(settings)}")
    try:
        config = config_of(settings)
        memories, forecast = estimate(config)
    except UserError as error:
        group.require(False, str(error))
        raise
    for name, ours, expected in (
        ("GPUs", config.distributed.world_size, GPUS),
        ("sequences per step", config.global_batch_size, SEQUENCES),
        ("tokens per sequence", config.training.seq_length, TOKENS),
    ):
        group.require(ours == expected, f"the settings are for {ours} {name}, expected {expected}")
    report.picture = draw(memories, forecast)
    most = max(memory.total for memory in memories) / GIB
    group.require(fits(most, GPU.gib), f"a rank needs {most:.1f} GiB, expected at most {usable(GPU.gib)}")
    par, best = (estimate(config_of(each))[1].step_time for each in (GIVEN, layout()))
    report.score = Score("step", forecast.step_time, PAR * par, best, "{:.3f} s")


def draw(memories: list[Memory], forecast: Forecast) -> str:
    """Draw the memory of the rank that needs most, and the time of a step."""
    largest = max(memories, key=lambda memory: memory.total)
    names = ("weights", "gradients", "optimizer", "gathered", "activations", "temporary")
    memory = {name: getattr(largest, name) / GIB for name in names}
    lines = [
        (f"memory: {largest.total / GIB:.1f} of {GPU.gib} GiB", boxes(memory, GPU.gib)),
        (f"step: {forecast.step_time:.2f} s", boxes(forecast.seconds._asdict(), forecast.step_time)),
    ]
    return rows("The pp rank that needs most", lines, "Hover over a box to see its name.")


def boxes(parts: dict[str, float], full: float) -> list[Cell]:
    """Return boxes whose widths are in proportion to numbers, eight units for all of them."""
    colours = TENSORS | {"compute": COLOURS["F"]}
    widths = {name: 8 * value / max(full, sum(parts.values())) for name, value in parts.items()}
    return [Cell(f"{name} {parts[name]:.3g}", colours.get(name, "#bbbbbb"), width) for name, width in widths.items()]
