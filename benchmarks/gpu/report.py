"""What the sections of `make gpu` share: options, parts of a page, tables, and timing on a CPU or a GPU.

A section is a function that returns its content in order: lines of text, and parts. A part is what has to be run to be
known, mostly one row of a table. It runs in a worker process and has a limit of its own, see program.py.
"""

import dataclasses
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from conformance.worker_pool import WorkerError
from workbench.explain.hardware import HARDWARE, Hardware


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run the sections.

    Args:
        on_gpu: False runs every section on the CPU, with tiny models.
        compiled: whether to run the parts that use torch.compile.
        trace: folder for the traces of steps; None: they are not kept.
    """

    on_gpu: bool = True
    compiled: bool = True
    trace: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    @property
    def patience(self) -> int:
        """Factor of all limits: a CPU may take longer, and nobody waits for it."""
        return 1 if self.on_gpu else 4

    @property
    def hardware(self) -> Hardware | None:
        """Rates that picotron assumes for this GPU, if it knows the GPU. On a CPU, an H200 stands for it."""
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else HARDWARE["H200"].name
        return next((each for each in HARDWARE.values() if each.name == name), None)


class Outcome(NamedTuple):
    """Lines of a part, and why one of its checks failed; "" if none did."""

    lines: list[str]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a section.

    Args:
        cells: what is known beforehand: the first cells of a row. They name the part if it fails.
        run: runs it. An exception makes it a failed row.
        limit: seconds after which it has failed.
    """

    cells: Sequence[str]
    run: Callable[[], Outcome]
    limit: float


Content = list[str | Part]


def row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def header(*cells: str) -> list[str]:
    return ["", row(cells), "|" + "---|" * len(cells)]


def table_row(cells: Sequence[str], measure: Callable[[], Sequence[Any]], limit: float) -> Part:
    """Return the part that is a row of a table: `cells`, and those that `measure` returns."""
    return Part(cells, lambda: Outcome([row([*cells, *measure()])]), limit)


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

    def run(self) -> Outcome:
        try:
            errors = self.errors()
        except WorkerError as error:  # on a rank of a pool of this check, which has replaced its processes
            return Outcome([row([*self.cells, f"**failed**: {reason(str(error))}"])], str(error))
        good = all(error <= self.limit for error in errors[: self.judged])  # False for NaN
        limit, verdict = "-" if math.isinf(self.limit) else f"{self.limit:g}", "ok" if good else "**failed**"
        line = row([*self.cells, *(f"{error:.1e}" for error in errors), limit, verdict])
        return Outcome([line], "" if good else f"an error is larger than {self.limit:g}")


def checked(checks: Iterable[Check], limit: float) -> Iterator[Part]:
    """Yield the rows of checks: cells, errors, limit of the errors, result. Each may take `limit` seconds."""
    for check in checks:
        yield Part(check.cells, check.run, limit)


def reason(error: str) -> str:
    """Return the last line of an error, for a cell of a table."""
    return error.strip().splitlines()[-1].replace("|", "/")[:200]


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


REPEATS = 10  # of an operation, between two times


def seconds_per_call(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call among many: the GPU does not wait for Python between them."""
    return median_seconds(lambda: [function() for _ in range(REPEATS)], device, repeats=5) / REPEATS


@functools.cache
def content(section: Callable[[Options], Content], options: Options) -> Content:
    """Return what a section consists of. Its parts share what they have computed, as long as their process lives."""
    return section(options)


def run_part(section: Callable[[Options], Content], options: Options, index: int) -> Outcome:
    """Run a part of a section, in a worker, with the same random numbers wherever it runs."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # shown, while the workers of tests raise them
        part = content(section, options)[index]
        assert isinstance(part, Part)
        return part.run()
