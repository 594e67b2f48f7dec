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
    "ZeRO-3": Errors(20, 0.033, -0.276, 0.037),
    "context": Errors(1, 0.335, 0.335, 0.335),
    "interleaved": Errors(10, 0.057, -0.065, 0.335),
    "zero bubble": Errors(7, 0.029, -0.211, 0.046),
    "parts": Errors(7, 0.091, -0.228, 0.142),
    "dp, tp, 1f1b": Errors(14, 0.110, -0.258, 0.266),
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
