"""Measurements of several variants in one run.

Each variant has separate processes, so that its peak memory can be measured. On a CPU, all processes stay alive and
the variants take turns, a few steps each, so that other load on the machine affects all variants equally. Speeds are
medians over the turns; a relative speed is the median of the ratios within each turn.

A comparison of programs that compute different things is worthless, so the steps return their losses, which
`print_table` compares. Every table ends with the commit, the machine and the versions that it was measured with.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers

from workbench.explain.measure import device_name

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


def _serve_steps(connection: Any, rank: int, variant: Variant) -> None:
    """Prepare a variant. Then, for each number received, run that many steps and send the time in seconds and the
    losses; for 0, send the peak memory in MiB and return.
    """
    step = variant.prepare(rank, *variant.arguments)
    connection.send("ready")
    while steps := connection.recv():
        start = time.perf_counter()
        losses = [step() for _ in range(steps)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        connection.send((time.perf_counter() - start, [float(loss) for loss in losses if loss is not None]))
    connection.send(peak_memory_mib())


def _serve_call(connection: Any, rank: int, function: Callable[..., Any], arguments: Any) -> None:
    connection.send(function(rank, *arguments))
    connection.poll(None)  # until `gather` ends, because other ranks may still communicate with this one


def _run(
    serve: Callable[..., None], connection: Any, rank: int, processes: int, rendezvous: str, *arguments: Any
) -> None:
    """Join the group of some processes, and serve; an error is sent."""
    try:
        torch.set_num_threads(1)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(rendezvous, processes), rank=rank, world_size=processes)
        serve(connection, rank, *arguments)
        dist.destroy_process_group()
    except Exception as error:
        connection.send(error)
        connection.poll(None)


@contextlib.contextmanager
def _ranks(serve: Callable[..., None], processes: int, *arguments: Any) -> Iterator[list[Any]]:
    """Start processes that call `serve(connection, rank, *arguments)`, and yield the other ends of their connections.
    They end with the context, which frees the memory of a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        connections, started = [], []
        for rank in range(processes):
            ours, theirs = CONTEXT.Pipe()
            call = (serve, theirs, rank, processes, f"{folder}/rendezvous", *arguments)
            started.append(CONTEXT.Process(target=_run, args=call, daemon=True))
            started[-1].start()
            theirs.close()
            connections.append(ours)
        try:
            yield connections
        finally:
            for connection in connections:
                connection.close()
            for process in started:
                process.join(30)


def gather(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in new processes, and return the results by rank."""
    with _ranks(_serve_call, processes, function, arguments) as connections:
        return _receive_all(connections)


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
    with contextlib.ExitStack() as stack:
        connections: dict[str, list[Any]] = {}
        for each in variants:
            connections[each.name] = stack.enter_context(_ranks(_serve_steps, each.processes, each))
            _receive_all(connections[each.name])

        def request(name: str, steps: int) -> list[Any]:
            for connection in connections[name]:
                connection.send(steps)
            return _receive_all(connections[name])

        found = {name: Measurement([], 0.0, []) for name in connections}
        for turn in range(turns + 1):
            for name, (seconds, _, losses) in found.items():
                times, by_rank = zip(*request(name, steps), strict=True)
                losses += map(statistics.mean, zip(*filter(None, by_rank), strict=True))
                if turn > 0:
                    seconds.append(max(times) / steps)
        return {name: each._replace(memory=max(request(name, 0))) for name, each in found.items()}


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
    where = device_name("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        where = f"{os.cpu_count()} cores of {where}, one thread per process"
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
