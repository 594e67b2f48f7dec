"""What the sections of `make gpu` share: options, tables of checks, and timing on a CPU or a GPU."""

import dataclasses
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Lines = Iterator[str]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run the sections.

    Args:
        on_gpu: False runs every section on the CPU, with tiny models.
        compiled: whether to run the rows that use torch.compile.
        trace: folder for the trace of a step; None: it is not kept.
    """

    on_gpu: bool = True
    compiled: bool = True
    trace: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of a table of errors.

    Args:
        cells: first cells of the row.
        errors: function that computes the errors in the other cells.
        limit: largest allowed error.
        judged: number of errors to which the limit applies; those after them are for comparison.
    """

    cells: Sequence[str]
    errors: Callable[[], Sequence[float]]
    limit: float
    judged: int = 1


def row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def header(*cells: str) -> Lines:
    yield ""
    yield row(cells)
    yield "|" + "---|" * len(cells)


def checked(checks: Iterable[Check], columns: int) -> Lines:
    """Run the checks, one after the other, and yield their rows: cells, errors, limit, result.

    Args:
        columns: number of errors of each check.

    Raises:
        AssertionError: after the last row, if a check failed.
    """
    failures = []
    for check in checks:
        try:
            errors = check.errors()
            good = all(error <= check.limit for error in errors[: check.judged])  # False for NaN
            texts = [f"{error:.1e}" for error in errors]
            problem = f"an error is larger than {check.limit:g}"
        except Exception as error:
            good, texts, problem = False, ["-"] * columns, traceback.format_exc(limit=-4)
            texts[0] = type(error).__name__
        yield row(
            [
                *check.cells,
                *texts,
                "-" if math.isinf(check.limit) else f"{check.limit:g}",
                "ok" if good else "**failed**",
            ]
        )
        if not good:
            failures.append(f"{' '.join(check.cells)}: {problem}")
    yield ""
    if failures:
        raise AssertionError("\n".join(failures))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(function: Callable[[], Any], device: torch.device, warm_up: int, repeats: int) -> list[float]:
    """Call a function `warm_up + repeats` times. Returns the seconds of each of the last `repeats` calls."""
    seconds = []
    for _ in range(warm_up + repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[warm_up:]


def median_seconds(function: Callable[[], Any], device: torch.device, warm_up: int = 3, repeats: int = 10) -> float:
    return statistics.median(seconds_of(function, device, warm_up, repeats))
