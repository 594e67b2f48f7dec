"""Errors of the forecast on published runs, by kind of layout. No torch here."""

from typing import NamedTuple

from picotron.config import Config
from workbench.explain.hardware import HARDWARE, Hardware


class Errors(NamedTuple):
    """Errors of a number of runs: forecast / measured - 1. Forecasts that are too fast have negative errors."""

    runs: int
    median: float  # of the absolute errors
    lowest: float
    highest: float


# Errors of the runs that are held out. `python -m benchmarks.forecast` prints these numbers; a test compares them.
ERRORS = {
    "ZeRO-3": Errors(20, 0.028, -0.268, 0.048),
    "context": Errors(1, 0.347, 0.347, 0.347),
    "interleaved": Errors(10, 0.051, -0.050, 0.347),
    "zero bubble": Errors(7, 0.038, -0.199, 0.063),
    "parts": Errors(9, 0.085, -0.221, 0.161),
    "dp, tp, 1f1b": Errors(17, 0.088, -0.293, 0.277),
    "H100, 1 GPU": Errors(2, 0.009, 0.006, 0.012),
    "H100, 2 to 8 GPUs": Errors(10, 0.060, -0.268, 0.088),
    "H100, more GPUs": Errors(11, 0.044, -0.293, 0.347),
    "A100, 2 to 8 GPUs": Errors(8, 0.019, -0.202, 0.048),
    "A100, more GPUs": Errors(22, 0.037, -0.079, 0.277),
    "RTX4090, 1 GPU": Errors(2, 0.149, -0.085, 0.213),
    "RTX4090, 2 to 8 GPUs": Errors(1, 0.014, 0.014, 0.014),
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
