"""Errors of the forecast on published runs, by kind of layout. No torch here."""

from typing import NamedTuple

from picotron.config import Config


class Errors(NamedTuple):
    """Errors of a number of runs: forecast / measured - 1. Forecasts that are too fast have negative errors."""

    runs: int
    median: float  # of the absolute errors
    lowest: float
    highest: float


# Errors of the runs that are held out. `python -m benchmarks.forecast` prints these numbers; a test compares them.
ERRORS = {
    "ZeRO-3": Errors(20, 0.056, -0.306, 0.077),
    "context": Errors(1, 0.282, 0.282, 0.282),
    "interleaved": Errors(10, 0.049, -0.071, 0.282),
    "zero bubble": Errors(7, 0.066, -0.200, 0.067),
    "parts": Errors(7, 0.088, -0.208, 0.149),
    "dp, tp, 1f1b": Errors(14, 0.116, -0.273, 0.336),
}


def kinds_of(config: Config) -> list[str]:
    """Return the kinds of a config of which there are published runs. "parts" are runs that recompute parts of each
    layer; published ones are marked.
    """
    layout = config.distributed
    engine = layout.pp_engine if layout.pp_size > 1 else ""
    found = {
        "ZeRO-3": layout.dp_engine == "zero3" and layout.dp_size * layout.cp_size > 1,
        "context": layout.cp_size > 1,
        "interleaved": engine.startswith("interleaved"),
        "zero bubble": engine.startswith("zb"),
        "parts": config.training.activation_checkpointing == "selective",
    }
    return [kind for kind, holds in found.items() if holds] or ["dp, tp, 1f1b"] * (engine in ("", "1f1b"))


def describe_errors(config: Config) -> str:
    """Return a line for each kind of a layout, with the range of the errors of published runs."""
    lines = [] if kinds_of(config) else ["this schedule: no published run of this kind"]
    for kind in kinds_of(config):
        runs, median, *ends = ERRORS[kind]
        low, high = (f"{abs(end):.0%} too {'fast' if end < 0 else 'slow'}" for end in ends)
        found = f"{runs} published runs ({kind}): from {low} to {high}, median error {median:.0%}"
        lines.append(f"1 published run ({kind}): {low}" if runs == 1 else found)
    return "\n".join(f"forecasts of {line}" for line in lines).replace("%", " %")
