"""The rule of dp in docs/when_an_axis_pays.md on this machine: the share of messages in a step of two ranks.

    python -m docs.programs.axis_run

The model is that of the benchmarks. Each step runs forward and backward of one micro-batch, with the reduction of its
gradients and without it, in turns. A CPU computes and sends with the same cores, so nothing hides messages. Times are
therefore those of the processor, which other programs disturb least: the shortest of several rounds. The rates of the
rule, FLOP/s of products and bytes/s of an all-reduce, are measured in the same way.
"""

import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.workload import model_config, run_config, training_of
from conformance.worker_pool import WorkerPool
from picotron.collectives import all_reduce
from picotron.console import text_table
from picotron.model.flops import model_cost

ROUNDS, SIZE = 3, 768


def shortest(function: Callable[[], object], rounds: int) -> float:
    """Return the shortest processor time of a call, after one that allocates its memory."""
    times = []
    for _ in range(1 + rounds):
        dist.barrier()
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times[1:])


def rates() -> tuple[float, float]:
    """Return the FLOP/s of a linear layer with its gradients, and the bytes/s that a rank sends in an all-reduce."""
    x, weight, dy = (torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(3))
    buffer = torch.zeros(SIZE, 4 * SIZE)
    computation = shortest(lambda: torch.autograd.grad(functional.linear(x, weight), (x, weight), dy), 4 * ROUNDS)
    return 6 * SIZE**3 / computation, buffer.nbytes / shortest(lambda: all_reduce(buffer, None), 4 * ROUNDS)


def seconds(length: int) -> tuple[float, float]:
    """Return the times of a step on a rank, with messages and without; all ranks must call this."""
    sizes = {"seq_length": length, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    step, model, loader = training_of(run_config({"dp_size": 2}, **sizes), torch.device("cpu"))

    def one_step() -> None:
        model.zero_grad()
        step(model, loader)

    found = []
    for _ in range(ROUNDS):
        sends = shortest(one_step, 1)
        with mock.patch("picotron.data_parallel.data_parallel.Bucket.launch"):
            found.append((sends, shortest(one_step, 1)))
    sends, silent = (min(each) for each in zip(*found, strict=True))
    return sends, silent


def main() -> None:
    pool, rows = WorkerPool(), [["tokens", "computation, s", "messages, s", "share", "by rule"]]
    products, link = (min(each) for each in zip(*pool.run(rates, 2), strict=True))
    print(f"{products / 1e9:.0f} GFLOP/s, {link / 1e9:.1f} GB/s: {products / link:.0f} FLOPs per byte\n")
    for length in (64, 256):
        sends, silent = (max(each) for each in zip(*pool.run(seconds, 2, length), strict=True))
        cost = model_cost(model_config(seq_length=length), length)
        messages, computation = 4 * cost.parameters / link, cost.flops * length / products  # float32; a ring of two
        measured = [f"{silent:.2f}", f"{sends - silent:.2f}", f"{1 - silent / sends:.0%}"]
        rows.append([f"{length}", *measured, f"{messages / (messages + computation):.0%}"])
    pool.close()
    print(text_table(rows, first_number=0))


if __name__ == "__main__":
    main()
