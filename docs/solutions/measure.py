"""Exercises "measure it yourself": the latency and bandwidth of an all-reduce, and a backward that hides one.

torchrun --nproc_per_node 2 -m docs.solutions.measure all_reduce
torchrun --nproc_per_node 2 -m docs.solutions.measure overlap     also writes two traces, for ui.perfetto.dev
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

SIZES = [4**k for k in range(4, 12)]  # numbers in float32: 1 KiB to 16 MiB
ROUNDS = 15


def seconds(function: Callable[[], object]) -> float:
    """Return the median time of a call that all ranks make together."""
    times = []
    for _ in range(2 + ROUNDS):  # the first two open connections and allocate memory
        dist.barrier()  # all ranks start at the same time
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def all_reduce() -> None:
    n, measured = dist.get_world_size(), list[float]()
    for size in SIZES:
        slowest = torch.tensor(seconds(functools.partial(dist.all_reduce, torch.zeros(size))))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # an all-reduce is over when it is over on all ranks
        measured.append(slowest.item())
    sent = [2 * (n - 1) / n * 4 * size for size in SIZES]  # bytes that a rank sends
    per_byte, latency = np.polyfit(sent, measured, 1, w=1 / np.array(measured))  # of relative errors
    if dist.get_rank() == 0:
        print("     KiB   measured, us   fitted, us")
        for size, bytes_sent, each in zip(SIZES, sent, measured, strict=True):
            print(f"{size * 4 / 1024:8,.0f}   {each * 1e6:12,.0f}   {(latency + per_byte * bytes_sent) * 1e6:10,.0f}")
        print(f"latency {latency * 1e6:.0f} us, bandwidth {1e-9 / per_byte:.2f} GB/s")


def step(model: nn.Sequential, x: Tensor, overlap: bool) -> None:
    """Run forward and backward, and sum the gradient of each matrix over the ranks: during backward, or after it."""
    works: list[dist.Work] = []

    def reduce(parameter: Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        works.append(work)

    hooks = [p.register_post_accumulate_grad_hook(reduce) for p in model.parameters()] if overlap else []
    y = model(x).sum()
    with record_function("backward"):
        y.backward()
    for parameter in [] if overlap else model.parameters():
        reduce(parameter)
    for work in works:
        work.wait()
    for hook in hooks:
        hook.remove()
    model.zero_grad()


def hidden(events: list[dict[str, float]], backward: dict[str, float]) -> float:
    """Return the time, in the trace's microseconds, for which some of the events run during backward."""
    start, end, total = backward["ts"], backward["ts"] + backward["dur"], 0.0
    for event in sorted(events, key=lambda each: each["ts"]):
        first, last = max(event["ts"], start), min(event["ts"] + event["dur"], end)
        total, start = total + max(0.0, last - first), max(start, last)
    return total


def overlap() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    x = torch.randn(256, 1024)
    for name in ("after_backward", "in_hooks"):
        step(model, x, name == "in_hooks")  # opens connections and allocates memory
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(model, x, name == "in_hooks")
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(f"{name}.json")
            with open(f"{name}.json") as file:
                events = [event for event in json.load(file)["traceEvents"] if "dur" in event]
            backward = next(event for event in events if event["name"] == "backward")
            sums = [event for event in events if event["name"] == "gloo:all_reduce"]
            end = max(event["ts"] + event["dur"] for event in sums) - backward["ts"]
            print(
                f"all-reduces {name.replace('_', ' ')}: backward takes {backward['dur'] / 1000:.0f} ms, "
                f"the last all-reduce ends at {end / 1000:.0f} ms; "
                f"one runs during {hidden(sums, backward) / backward['dur']:.0%} of backward"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercise", choices=("all_reduce", "overlap"))
    exercise = parser.parse_args().exercise
    dist.init_process_group("gloo")
    all_reduce() if exercise == "all_reduce" else overlap()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
