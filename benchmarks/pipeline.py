"""Pipelines: idle time of the stages, compared with the papers' formula; memory saved by freeing outputs once sent.

python -m benchmarks.pipeline

(benchmarks.schedules compares the speed with torch.distributed.pipelining.)
"""

import statistics
import weakref
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.schedules import PP, recorded
from benchmarks.side_by_side import gather, print_markdown
from benchmarks.workload import ON_GPU, arguments, run_config, training_of
from picotron.pipeline_parallel.pipeline_parallel import forward_step, graph_of
from workbench.explain.fake_group import fake_rank
from workbench.schedules.simulate import Timeline

MODULE = "picotron.pipeline_parallel.pipeline_parallel"


def bubble(turns: int) -> None:
    print(f"\nIdle fraction of a step with pp {PP}. The formula assumes equal stages.")
    rows = [["", "micro-batches", "computing, s, each stage", "step, s", "idle", "(p - 1)/(m + p - 1)"]]
    for engine in ("afab", "1f1b"):
        for micro_batches in (1, 2, 4, 8):
            steps = [Timeline(spans) for spans in zip(*gather(recorded, PP, engine, micro_batches, turns), strict=True)]
            step = statistics.median(each.step_time for each in steps)
            idle = [statistics.median(seconds) for seconds in zip(*(each.idle for each in steps), strict=True)]
            computing = " and ".join(f"{step - seconds:.2f}" for seconds in idle)
            measured, formula = sum(idle) / PP / step, (PP - 1) / (micro_batches + PP - 1)
            rows.append([engine, str(micro_batches), computing, f"{step:.2f}", f"{measured:.1%}", f"{formula:.1%}"])
    print_markdown(rows)


def bytes_of_outputs(engine: str, free_outputs: bool) -> int:
    """Return the peak size of the outputs in memory on pp rank 0 of 4, in a step of 8 micro-batches."""
    config = run_config({"pp_size": 4, "pp_engine": engine}, gradient_accumulation_steps=8)
    outputs, peak = [], 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal peak
        y = forward_step(*arguments)
        outputs.append(weakref.ref(y.untyped_storage()))
        peak = max(peak, sum(alive.nbytes() for storage in outputs if (alive := storage()) is not None))
        return y

    with (
        fake_rank(0, config.distributed),
        mock.patch(f"{MODULE}.forward_step", counted),
        mock.patch(f"{MODULE}.graph_of", graph_of if free_outputs else HeldOutput),
    ):
        train_step, model, loader = training_of(config, torch.device("cpu"))
        train_step(model, loader)
    return peak


class HeldOutput(list[Any]):
    """The graph of an output, with the output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__([graph_of(output)])
        self.output = output


def outputs() -> None:
    print(
        "\nPeak of the outputs in memory on pp rank 0 of 4, in a step of 8 micro-batches; an output is B T D numbers."
    )
    sizes = {e: [bytes_of_outputs(e, free_outputs) for free_outputs in (True, False)] for e in ("afab", "1f1b")}
    rows = [[engine, *(f"{size / 2**20:.1f}" for size in each)] for engine, each in sizes.items()]
    print_markdown([["", "outputs freed once sent, MiB", "outputs kept, MiB"], *rows])


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if ON_GPU:
        raise SystemExit("this benchmark runs on the CPU only; set CUDA_VISIBLE_DEVICES=''")
    outputs()
    bubble(options.turns)


if __name__ == "__main__":
    main()
