"""Measurements of several variants in one run.

Each variant has separate processes, so that its peak memory can be measured. On a CPU, all processes stay alive and
the variants take turns, a few steps each, so that other load on the machine affects all variants equally. Speeds are
medians over the turns; a relative speed is the median of the ratios within each turn.

A comparison of programs that compute different things is worthless, so the steps return their losses, which
`print_table` compares. Every table ends with the commit, the machine and the versions that it was measured with.
"""

import dataclasses
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers

from conformance.worker_pool import WorkerPool
from workbench.explain.measure import device_name
from workbench.run.metrics import memory_gb

LIMIT = 7200.0  # seconds for a comparison


@dataclasses.dataclass
class Variant:
    """One row of a comparison.

    Args:
        name: first cell of the row.
        prepare: called as `prepare(rank, *arguments)` in each process; returns a function that runs one step, and
            returns this rank's loss, or None if the rank has none. The mean over the ranks is the loss of the step.
        processes: number of processes.
    """

    name: str
    prepare: Callable[..., Callable[[], Any]]
    arguments: tuple[Any, ...] = ()
    processes: int = 1


class DifferentResults(Exception):
    """Two variants that did not compute the same numbers."""


class Measurement(NamedTuple):
    """The result of a variant: seconds per step of each turn, peak memory of its largest process in MiB, and the losses
    of all steps, including those of the warm-up.
    """

    seconds: list[float]
    memory: float
    losses: list[float]


def peak_memory_mib() -> float:
    return memory_gb(torch.device("cuda" if torch.cuda.is_available() else "cpu")) * 1e9 / 2**20


def new_pool() -> WorkerPool:
    if torch.cuda.is_available():  # a process that uses a GPU cannot be forked
        return WorkerPool("nccl", multiprocessing.get_context("spawn"))
    return WorkerPool()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(dist.get_rank(), *arguments)


def gather(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in new processes, and return the results by rank."""
    pool = new_pool()
    try:
        return pool.run(_call, processes, function, *arguments, timeout=LIMIT)
    finally:
        pool.close()


def take_turns(variant: Variant, turns: int, steps: int, folder: Path, place: int, others: int) -> Measurement:
    """Prepare a variant, and run some steps whenever it is its turn, first as a warm-up. A variant that has run makes
    the file for which the next one waits.
    """
    step, result = variant.prepare(dist.get_rank(), *variant.arguments), Measurement([], 0.0, [])
    for turn in range(place, place + (turns + 1) * others, others):
        while not (folder / str(turn)).exists():
            time.sleep(0.02)
        dist.barrier()
        start = time.perf_counter()
        losses = [step() for _ in range(steps)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        result.seconds.append((time.perf_counter() - start) / steps)
        result.losses.extend(float(loss) for loss in losses if loss is not None)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / str(turn + 1)).touch()
    return result._replace(seconds=result.seconds[1:], memory=peak_memory_mib())


def measure(variants: list[Variant], turns: int, steps: int) -> dict[str, Measurement]:
    """Measure the variants in turns. A GPU may not hold all of them: there, each is measured by itself."""
    if torch.cuda.is_available() and len(variants) > 1:
        return {name: result for each in variants for name, result in measure([each], turns, steps).items()}
    pools = [new_pool() for _ in variants]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(variants)) as threads:
        Path(folder, "0").touch()
        calls = [
            threads.submit(
                pool.run,
                take_turns,
                each.processes,
                each,
                turns,
                steps,
                Path(folder),
                place,
                len(variants),
                timeout=LIMIT,
            )
            for place, (each, pool) in enumerate(zip(variants, pools, strict=True))
        ]
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        for pool in pools:
            pool.close()  # of all variants, if one of them has failed
        for call in done:
            call.result()
    found = {}
    for each, call in zip(variants, calls, strict=True):
        seconds, memory, losses = zip(*call.result(), strict=True)
        means = [statistics.mean(step) for step in zip(*filter(None, losses), strict=True)]
        found[each.name] = Measurement([max(turn) for turn in zip(*seconds, strict=True)], max(memory), means)
    return found


def check_same_losses(results: dict[str, Measurement]) -> None:
    """Compare the losses of the first two steps. The second loss depends on the first step's gradients and optimizer.
    (Later losses differ more and more, because AdamW amplifies differences in rounding.)

    Raises:
        DifferentResults: they differ by more than rounding.
    """
    tolerance = 2e-2 if torch.cuda.is_available() else 1e-5  # of bfloat16 and float32
    (baseline, (_, _, expected)), *others = results.items()
    for name, (_, _, losses) in others:
        for step, (theirs, ours) in enumerate(zip(expected[:2], losses[:2], strict=True)):
            if not math.isclose(theirs, ours, rel_tol=tolerance):
                raise DifferentResults(f"step {step + 1}: {theirs:.6f} ({baseline}), {ours:.6f} ({name})")


def machine() -> str:
    """Describe the hardware and the versions of the libraries."""
    where = device_name("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        where = f"{os.cpu_count()} cores of {where}, one thread per process"
    return f"{where}; torch {torch.__version__}, transformers {transformers.__version__}"


def commit() -> str:
    """Describe the commit of the program, such as `abc1234`, or `abc1234-dirty` if files have changed."""
    command, folder = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout if shutil.which("git") else ""
    return f"commit {found.strip() or 'unknown'}"


def print_markdown(rows: Sequence[Sequence[str]]) -> None:
    """Print a table for a Markdown page, and what it was measured with; the first row is the header."""
    header, *others = ("| " + " | ".join(row) + " |" for row in rows)
    print("", header, "|" + "---|" * len(rows[0]), *others, "", f"Measured at {commit()}; {machine()}.", sep="\n")


def print_table(
    results: dict[str, Measurement],
    tokens_per_step: int,
    baseline: str,
    mfu: Callable[[float], str] | None = None,
) -> None:
    """Print speed and peak memory of each variant, and both relative to `baseline`.

    Args:
        results: see `measure`.
        mfu: function from the tokens/s of a row to its cell in an additional column, MFU.

    Raises:
        DifferentResults: see `check_same_losses`.
    """
    check_same_losses(results)
    header = ["", "tokens/s", "relative speed", "peak memory, MiB per process", "relative memory"]
    rows = [header + ["MFU"] * (mfu is not None)]
    base_seconds, base_memory, _ = results[baseline]
    for name, (seconds, memory, _) in results.items():
        rate = tokens_per_step / statistics.median(seconds)
        speed = statistics.median(b / s for b, s in zip(base_seconds, seconds, strict=True))
        row = [name, f"{rate:,.0f}", f"{speed:.2f}", f"{memory:,.0f}", f"{memory / base_memory:.2f}"]
        rows.append(row + ([mfu(rate)] if mfu else []))
    print_markdown(rows)
