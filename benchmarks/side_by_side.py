"""Measure variants side by side in one run.

Each variant lives in processes of its own, so that its peak memory is its own; all are alive at the same time and take
turns, a few steps each, so that whatever else the machine does hits all of them alike. A row of the table is the median
over the turns; a ratio is the median of the ratios within each turn.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

CONTEXT = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class Variant:
    """A name, and `prepare(rank, *arguments)` that returns a function to run one step with, in `processes` of them."""

    name: str
    prepare: Callable[..., Callable[[], Any]]
    arguments: tuple[Any, ...] = ()
    processes: int = 1


def peak_memory_mib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _started(rank: int, processes: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(rendezvous, processes), rank=rank, world_size=processes)


def _work(connection: Any, variant: Variant, rank: int, rendezvous: str) -> None:
    """Prepare, then answer each number of steps with the seconds they took, and 0 with the peak memory."""
    try:
        _started(rank, variant.processes, rendezvous)
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


def _call(
    connection: Any, function: Callable[..., Any], rank: int, processes: int, rendezvous: str, arguments: Any
) -> None:
    try:
        _started(rank, processes, rendezvous)
        connection.send(function(rank, *arguments))
    except Exception as error:
        connection.send(error)


def gather(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` of so many processes, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        connections = []
        for rank in range(processes):
            ours, theirs = CONTEXT.Pipe()
            call = (theirs, function, rank, processes, f"{folder}/rendezvous", arguments)
            CONTEXT.Process(target=_call, args=call, daemon=True).start()
            theirs.close()
            connections.append(ours)
        return [_answer(connection) for connection in connections]


def _answer(connection: Any) -> Any:
    answer = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def measure(variants: list[Variant], turns: int, steps: int) -> dict[str, tuple[list[float], float]]:
    """By name: the seconds per step of each turn, and the peak memory in MiB of the largest process."""
    connections: dict[str, list[Any]] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(variants):
            connections[variant.name] = []
            for rank in range(variant.processes):
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=_work, args=(theirs, variant, rank, f"{folder}/{number}"), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections[variant.name].append(ours)
            for connection in connections[variant.name]:
                _answer(connection)

        def everyone(name: str, message: int) -> list[float]:
            for connection in connections[name]:
                connection.send(message)
            return [_answer(connection) for connection in connections[name]]

        seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for turn in range(turns + 1):
            for variant in variants:
                taken = max(everyone(variant.name, steps)) / steps
                if turn > 0:  # the first warms up
                    seconds[variant.name].append(taken)
        memory = {variant.name: max(everyone(variant.name, 0)) for variant in variants}
        for process in processes:
            process.join(10)
    return {name: (seconds[name], memory[name]) for name in seconds}


def machine() -> str:
    """One line about where this ran."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        model = (
            re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
        )
        where = f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}, one thread per process"
    return f"{where}; torch {torch.__version__}, transformers {transformers.__version__}"


def print_table(
    results: dict[str, tuple[list[float], float]],
    tokens_per_step: int,
    baseline: str,
    extra: Callable[[float], str] | None = None,
) -> None:
    """A markdown table: tokens/s and peak memory of each variant, and both as ratios to `baseline`.

    Args:
        extra: one more column (MFU) from the tokens/s of a row.
    """
    print(f"\n{machine()}\n")
    print("| | tokens/s | ratio | peak memory, MiB per process | ratio |" + (" MFU |" if extra else ""))
    print("|---|---|---|---|---|" + ("---|" if extra else ""))
    base_seconds, base_memory = results[baseline]
    for name, (seconds, memory) in results.items():
        rate = tokens_per_step / statistics.median(seconds)
        ratio = statistics.median(b / s for b, s in zip(base_seconds, seconds, strict=True))
        row = f"| {name} | {rate:,.0f} | {ratio:.2f} | {memory:,.0f} | {memory / base_memory:.2f} |"
        print(row + (f" {extra(rate)} |" if extra else ""))
