"""Measurements of several variants in one run.

Each variant has separate processes, so that its peak memory can be measured. On a CPU, all processes stay alive and
the variants take turns, a few steps each, so that other load on the machine affects all variants equally. Speeds are
medians over the turns; a relative speed is the median of the ratios within each turn.

A comparison of programs that compute different things is worthless, so the steps return their losses, which
`print_table` compares. Every table ends with the commit, the machine and the versions that it was measured with.
"""

import dataclasses
import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers

# A fork server imports the libraries once for all processes. A process that uses a GPU cannot be forked.
CONTEXT: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
if not torch.cuda.is_available():
    CONTEXT.set_forkserver_preload(
        ["transformers.models.llama.modeling_llama", "picotron.pipeline_parallel.pipeline_parallel"]
    )


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
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _join_group(rank: int, processes: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(rendezvous, processes), rank=rank, world_size=processes)


def _serve_steps(connection: Any, variant: Variant, rank: int, rendezvous: str) -> None:
    """Prepare a variant. Then, for each number received, run that many steps and send the time in seconds and the
    losses; for 0, send the peak memory in MiB and return.
    """
    try:
        _join_group(rank, variant.processes, rendezvous)
        step = variant.prepare(rank, *variant.arguments)
        connection.send("ready")
        while steps := connection.recv():
            start = time.perf_counter()
            losses = [step() for _ in range(steps)]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            connection.send((time.perf_counter() - start, [float(loss) for loss in losses if loss is not None]))
        connection.send(peak_memory_mib())
        dist.destroy_process_group()
    except Exception as error:
        connection.send(error)


def _serve_call(
    connection: Any, function: Callable[..., Any], rank: int, processes: int, rendezvous: str, arguments: Any
) -> None:
    try:
        _join_group(rank, processes, rendezvous)
        result = function(rank, *arguments)
    except Exception as error:
        result = error
    connection.send(result)
    connection.poll(None)  # until `gather` ends, because other ranks may still communicate with this one
    if not isinstance(result, Exception):
        dist.destroy_process_group()


def gather(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in new processes, and return the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        connections, started = [], []
        for rank in range(processes):
            ours, theirs = CONTEXT.Pipe()
            call = (theirs, function, rank, processes, f"{folder}/rendezvous", arguments)
            started.append(CONTEXT.Process(target=_serve_call, args=call, daemon=True))
            started[-1].start()
            theirs.close()
            connections.append(ours)
        try:
            return _receive_all(connections)
        finally:
            for connection in connections:
                connection.close()
            for process in started:
                process.join(30)  # which frees the memory of a GPU


def _receive_all(connections: list[Any]) -> list[Any]:
    """Receive the results of all ranks. If one fails, others fail because they have lost it, or wait for it."""
    results: dict[Any, Any] = {}
    errors: list[Exception] = []
    while waiting := [connection for connection in connections if connection not in results]:
        if not (ready := multiprocessing.connection.wait(waiting, timeout=5 if errors else None)):
            break
        results |= {connection: connection.recv() for connection in ready}
        errors = [result for result in results.values() if isinstance(result, Exception)]
    if errors:
        raise ExceptionGroup("some ranks have failed", errors)
    return [results[connection] for connection in connections]


def measure(variants: list[Variant], turns: int, steps: int) -> dict[str, Measurement]:
    """Measure the variants in turns, after a turn as a warm-up. A GPU may not hold all of them: there, each is measured
    by itself.
    """
    if torch.cuda.is_available() and len(variants) > 1:
        return {name: result for each in variants for name, result in measure([each], turns, steps).items()}
    connections: dict[str, list[Any]] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(variants):
            connections[variant.name] = []
            for rank in range(variant.processes):
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(
                    target=_serve_steps, args=(theirs, variant, rank, f"{folder}/{number}"), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections[variant.name].append(ours)
            _receive_all(connections[variant.name])

        def request(name: str, steps: int) -> list[Any]:
            for connection in connections[name]:
                connection.send(steps)
            return _receive_all(connections[name])

        seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
        losses: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for turn in range(turns + 1):
            for variant in variants:
                times, by_rank = zip(*request(variant.name, steps), strict=True)
                losses[variant.name] += map(statistics.mean, zip(*filter(None, by_rank), strict=True))
                if turn > 0:
                    seconds[variant.name].append(max(times) / steps)
        memory = {variant.name: max(request(variant.name, 0)) for variant in variants}
        for process in processes:
            process.join(10)
    return {name: Measurement(seconds[name], memory[name], losses[name]) for name in seconds}


def check_same_losses(results: dict[str, Measurement]) -> None:
    """Compare the losses of the first two steps. The second loss depends on the first step's gradients and optimizer.
    (Later losses differ more and more, because AdamW amplifies differences in rounding.)

    Raises:
        DifferentResults: they differ by more than rounding.
    """
    tolerance = 2e-2 if torch.cuda.is_available() else 1e-4  # of bfloat16 and float32
    (baseline, (_, _, expected)), *others = results.items()
    for name, (_, _, losses) in others:
        for step, (theirs, ours) in enumerate(zip(expected[:2], losses[:2], strict=True)):
            if not math.isclose(theirs, ours, rel_tol=tolerance):
                raise DifferentResults(f"step {step + 1}: {theirs:.6f} ({baseline}), {ours:.6f} ({name})")


def machine() -> str:
    """Describe the hardware and the versions of the libraries."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        model = (
            re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
        )
        where = f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}, one thread per process"
    return f"{where}; torch {torch.__version__}, transformers {transformers.__version__}"


@functools.cache
def commit(folder: Path = Path(__file__).parent.parent) -> str:
    """Describe the commit of the program: `commit abc1234 (2026-01-31) + changes`, or `unknown commit`."""

    def git(*arguments: str) -> str:
        # `-- .` finds no commit in a copy of the files that lies inside of another repository.
        return subprocess.run(["git", *arguments, "--", "."], cwd=folder, capture_output=True, text=True).stdout.strip()

    head = git("log", "-1", "--format=%h (%cs)") if shutil.which("git") else ""
    if not head:
        return "unknown commit"
    return f"commit {head}" + (" + changes" if git("status", "--porcelain") else "")


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
