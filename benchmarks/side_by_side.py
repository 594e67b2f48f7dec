"""Measurements of several variants in one run.

Each variant has separate processes, so that its peak memory can be measured. All processes stay alive and
the variants take turns, a few steps each, so that other load on the machine affects all variants equally. Speeds are
medians over the turns; a relative speed is the median of the ratios within each turn.
"""

import dataclasses
import multiprocessing
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

CONTEXT = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class Variant:
    """One row of a comparison.

    Args:
        name: first cell of the row.
        prepare: called as `prepare(rank, *arguments)` in each process; returns a function that runs one step.
        processes: number of processes.
    """

    name: str
    prepare: Callable[..., Callable[[], Any]]
    arguments: tuple[Any, ...] = ()
    processes: int = 1


def peak_memory_mib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _join_group(rank: int, processes: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(rendezvous, processes), rank=rank, world_size=processes)


def _serve_steps(connection: Any, variant: Variant, rank: int, rendezvous: str) -> None:
    """Prepare a variant. Then, for each number received, run that many steps and send the time in seconds; for 0, send
    the peak memory in MiB and return.
    """
    try:
        _join_group(rank, variant.processes, rendezvous)
        step = variant.prepare(rank, *variant.arguments)
        connection.send("ready")
        while steps := connection.recv():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the other variants need room on the same GPU
            connection.send(time.perf_counter() - start)
        connection.send(peak_memory_mib())
    except Exception as error:
        connection.send(error)


def _serve_call(
    connection: Any, function: Callable[..., Any], rank: int, processes: int, rendezvous: str, arguments: Any
) -> None:
    try:
        _join_group(rank, processes, rendezvous)
        connection.send(function(rank, *arguments))
    except Exception as error:
        connection.send(error)


def gather(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in new processes, and return the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        connections = []
        for rank in range(processes):
            ours, theirs = CONTEXT.Pipe()
            call = (theirs, function, rank, processes, f"{folder}/rendezvous", arguments)
            CONTEXT.Process(target=_serve_call, args=call, daemon=True).start()
            theirs.close()
            connections.append(ours)
        return [_receive(connection) for connection in connections]


def _receive(connection: Any) -> Any:
    result = connection.recv()
    if isinstance(result, Exception):
        raise result
    return result


def measure(variants: list[Variant], turns: int, steps: int) -> dict[str, tuple[list[float], float]]:
    """Return for each variant the seconds per step of each turn, and the peak memory of its largest process in MiB."""
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
            for connection in connections[variant.name]:
                _receive(connection)

        def request(name: str, steps: int) -> list[float]:
            for connection in connections[name]:
                connection.send(steps)
            return [_receive(connection) for connection in connections[name]]

        seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for turn in range(turns + 1):
            for variant in variants:
                slowest = max(request(variant.name, steps)) / steps
                if turn > 0:  # the first turn is a warm-up
                    seconds[variant.name].append(slowest)
        memory = {variant.name: max(request(variant.name, 0)) for variant in variants}
        for process in processes:
            process.join(10)
    return {name: (seconds[name], memory[name]) for name in seconds}


def machine() -> str:
    """Return one line about the hardware and the versions of the libraries."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        model = (
            re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
        )
        where = f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}, one thread per process"
    return f"{where}; torch {torch.__version__}, transformers {transformers.__version__}"


def print_markdown(rows: Sequence[Sequence[str]]) -> None:
    """Print a table for a Markdown page; the first row is the header."""
    header, *others = ("| " + " | ".join(row) + " |" for row in rows)
    print("", header, "|" + "---|" * len(rows[0]), *others, sep="\n")


def print_table(
    results: dict[str, tuple[list[float], float]],
    tokens_per_step: int,
    baseline: str,
    mfu: Callable[[float], str] | None = None,
) -> None:
    """Print speed and peak memory of each variant, and both relative to `baseline`.

    Args:
        results: see `measure`.
        mfu: function from the tokens/s of a row to its cell in an additional column, MFU.
    """
    header = ["", "tokens/s", "relative speed", "peak memory, MiB per process", "relative memory"]
    rows = [header + ["MFU"] * (mfu is not None)]
    base_seconds, base_memory = results[baseline]
    for name, (seconds, memory) in results.items():
        rate = tokens_per_step / statistics.median(seconds)
        speed = statistics.median(b / s for b, s in zip(base_seconds, seconds, strict=True))
        row = [name, f"{rate:,.0f}", f"{speed:.2f}", f"{memory:,.0f}", f"{memory / base_memory:.2f}"]
        rows.append(row + ([mfu(rate)] if mfu else []))
    print(f"\n{machine()}")
    print_markdown(rows)
