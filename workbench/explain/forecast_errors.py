"""Errors of the forecast on published runs, by kind of layout. No torch here."""

from typing import NamedTuple

from picotron.config import Config
from workbench.explain.hardware import HARDWARE, Hardware


class Errors(NamedTuple):
    """Errors of a number of runs: forecast / measured - 1. Forecasts that are too fast have negative errors."""

    runs: int
    median: float  # of the absolute errors of runs that did not choose prices, if there are some
    lowest: float
    highest: float


# Errors of published runs. `python -m benchmarks.forecast` prints these numbers; a test compares them.
ERRORS = {
    "ZeRO-3": Errors(55, 0.040, -0.334, 0.210),
    "context": Errors(6, 0.188, 0.151, 0.322),
    "interleaved": Errors(23, 0.056, -0.050, 0.322),
    "zero bubble": Errors(14, 0.038, -0.199, 0.063),
    "parts": Errors(15, 0.085, -0.228, 0.185),
    "dp, tp, 1f1b": Errors(49, 0.074, -0.530, 0.277),
    "H100, 1 GPU": Errors(4, 0.015, -0.074, 0.012),
    "H100, 2 to 8 GPUs": Errors(25, 0.060, -0.334, 0.202),
    "H100, more GPUs": Errors(32, 0.151, -0.530, 0.322),
    "A100, 2 to 8 GPUs": Errors(17, 0.019, -0.202, 0.185),
    "A100, more GPUs": Errors(51, 0.039, -0.208, 0.277),
    "RTX4090, 1 GPU": Errors(2, 0.149, -0.085, 0.213),
    "RTX4090, 2 to 8 GPUs": Errors(1, 0.014, 0.014, 0.014),
    "H200, 1 GPU": Errors(1, 0.074, 0.074, 0.074),
    "H200, 2 to 8 GPUs": Errors(6, 0.088, -0.332, 0.147),
    "H200, more GPUs": Errors(6, 0.091, -0.086, 0.210),
}


def gpus(device: str, ranks: int) -> str:
    """Return the kind of a run by its GPUs: a key of HARDWARE and their number."""
    return f"{device}, {'1 GPU' if ranks == 1 else '2 to 8 GPUs' if ranks <= 8 else 'more GPUs'}"


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


def describe_errors(config: Config, hardware: Hardware, layout: bool = True) -> str:
    """Return a line for each kind of the config's runs, with the range of the errors of published runs: of its GPUs or
    of the nearest ones, and of its `layout`.
    """
    device = next((key for key, each in HARDWARE.items() if each.name == hardware.name), "")
    kind, lines, kinds = gpus(device, config.distributed.world_size), list[str](), kinds_of(config) if layout else []
    if layout and not kinds:
        lines.append("this schedule: no published run of this kind")
    if kind in ERRORS:
        kinds = [kind, *kinds]
    else:
        number = kind.partition(", ")[2]
        near = [each for each in ERRORS if device and each.startswith(device)]
        lines.append(
            f"this GPU: no published run{f' of {number}' if near else ''}; the next lines are of the nearest ones"
        )
        kinds = [*(near or [each for each in ERRORS if each.endswith(number)]), *kinds]
    for each in kinds:
        runs, median, *ends = ERRORS[each]
        low, high = (f"{abs(end):.0%} too {'fast' if end < 0 else 'slow'}" for end in ends)
        found = f"{runs} published runs ({each}): from {low} to {high}, median error {median:.0%}"
        lines.append(f"1 published run ({each}): {low}" if runs == 1 else found)
    return "\n".join(f"forecasts of {line}" for line in lines).replace("%", " %")
