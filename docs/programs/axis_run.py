"""Rules of docs/when_an_axis_pays.md on this machine: the share of messages in a step of two ranks, run and by rule.

    python -m docs.programs.axis_run

The model is that of the benchmarks. Each step runs forward and backward of one micro-batch, with its messages and with
nothing in their place, in turns. A CPU computes and sends with the same cores, so nothing hides messages. Times are
therefore those of the processor, which other programs disturb least: the shortest of several rounds. The rates of the
rule, FLOP/s of products and bytes/s of an all-reduce, are measured in the same way.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.workload import LAYERS, TINY, model_config, run_config, training_of
from conformance.worker_pool import WorkerPool
from docs.programs.mistake import replaced
from picotron.collectives import all_reduce
from picotron.console import text_table
from picotron.model.flops import model_cost

LENGTHS = (16, 32) if TINY else (64, 256)
ROUNDS = 1 if TINY else 3
SIZE = 64 if TINY else 768


def no_reduction(bucket: Any) -> None:
    """Replace `Bucket.launch`: average nothing."""


def no_all_reduce(partial: Tensor, group: Any) -> Callable[[], Tensor]:
    return lambda: partial


SILENT: dict[str, dict[str, Any]] = {
    "dp": {"picotron.data_parallel.data_parallel.Bucket.launch": no_reduction},
    "tp": {
        "picotron.tensor_parallel.tp_communications.start_all_reduce": no_all_reduce,
        "picotron.tensor_parallel.tensor_parallel.start_all_reduce": no_all_reduce,
    },
}


def shortest(function: Callable[[], object], rounds: int = ROUNDS) -> float:
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


def seconds(axis: str, length: int) -> tuple[float, float]:
    """Return the times of a step on a rank, with messages and without; all ranks must call this."""
    sizes = {"seq_length": length, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    step, model, loader = training_of(run_config({f"{axis}_size": 2}, **sizes), torch.device("cpu"))

    def run() -> None:
        step(model, loader)

    def run_silently() -> None:
        with replaced(SILENT[axis]):
            step(model, loader)

    found = [(shortest(run, 1), shortest(run_silently, 1)) for _ in range(ROUNDS)]
    sends, silent = (min(each) for each in zip(*found, strict=True))
    return sends, silent


def by_rule(axis: str, length: int, products: float, link: float) -> float:
    """Return the share of messages in a step of two ranks, in float32, for FLOP/s and bytes/s.

    A step of dp sends P gradients. A layer of tp has four all-reduces of hidden states, and the embedding and the head
    have one each. A ring of two ranks sends as many bytes as a tensor has.
    """
    model = model_config(seq_length=length)
    cost = model_cost(model, length)
    sent = 4 * (cost.parameters if axis == "dp" else (4 * LAYERS + 2) * length * model.hidden_size)
    computation = cost.flops * length / (2 if axis == "tp" else 1)
    return sent / link / (sent / link + computation / products)


def main() -> None:
    pool, rows = WorkerPool(), [["", "tokens", "computation, s", "messages, s", "share", "by rule"]]
    products, link = (min(each) for each in zip(*pool.run(rates, 2), strict=True))
    print(f"{products / 1e9:.0f} GFLOP/s, {link / 1e9:.1f} GB/s: {products / link:.0f} FLOPs per byte\n")
    for axis in SILENT:
        for length in LENGTHS:
            results = pool.run(seconds, 2, axis, length)
            sends, silent = (max(each) for each in zip(*results, strict=True))
            rule = by_rule(axis, length, products, link)
            numbers = [f"{silent:.2f}", f"{sends - silent:.2f}", f"{1 - silent / sends:.0%}", f"{rule:.0%}"]
            rows.append([f"{axis} 2", f"{length}", *numbers])
    pool.close()
    print(text_table(rows, first_number=1))


if __name__ == "__main__":
    main()
