"""Check of puzzle 16: a config that the trainer accepts, its memory and the time of its step, by the formulas. The best
known layout is the solution, which the tests compare with a search of all layouts.
"""

from types import ModuleType
from typing import Any

from docs.programs.memory_pictures import bars, sizes
from picotron.config import Config, Distributed, Training
from picotron.console import UserError
from puzzles.group import Group
from puzzles.report import Report, Score, kind
from puzzles.solutions.p16_layout import layout
from workbench.explain.hardware import HARDWARE, fits, usable
from workbench.explain.step_time import Forecast, forecast
from workbench.pipelines.engine import check_layout
from workbench.pipelines.memory import GIB, Memory, rank_memory
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
    parts = ", ".join(f"{name} {each:.3g}" for name, each in forecast.seconds._asdict().items() if each)
    by_rank = {f"pp rank {rank}": sizes(memory, GIB) for rank, memory in enumerate(memories)}
    report.picture = bars(by_rank, "GiB", f"Grey: an H100. Seconds: {parts}.", GPU.gib, GPU.gib)
    most = max(memory.total for memory in memories) / GIB
    group.require(fits(most, GPU.gib), f"a rank needs {most:.1f} GiB, expected at most {usable(GPU.gib)}")
    par, best = (estimate(config_of(each))[1].step_time for each in (GIVEN, layout()))
    report.score = Score("step", forecast.step_time, PAR * par, best, "{:.3f} s")
