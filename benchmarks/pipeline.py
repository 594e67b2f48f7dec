"""What a pipeline costs: how long its stages are idle, beside the papers' formula; and what freeing sent outputs saves.

python -m benchmarks.pipeline

(Its speed, beside that of torch.distributed.pipelining, is in benchmarks.schedules.)
"""

import statistics
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.schedules import PP, recorded
from benchmarks.side_by_side import gather
from benchmarks.workload import ON_GPU, arguments, run_config, training_of
from picotron.pipeline_parallel import pipeline_parallel
from picotron.schedules.simulate import Timeline


def bubble(turns: int) -> None:
    """The idle part of a step, beside the papers' formula, which supposes stages that take equally long."""
    print("\n| | micro-batches | computing, s per stage | step, s | idle | (p - 1)/(m + p - 1) |")
    print("|---|---|---|---|---|---|")
    for engine in ("afab", "1f1b"):
        for micro_batches in (1, 2, 4, 8):
            steps = [Timeline(spans) for spans in zip(*gather(recorded, PP, engine, micro_batches, turns), strict=True)]
            step = statistics.median(each.step_time for each in steps)
            idle = [statistics.median(seconds) for seconds in zip(*(each.idle for each in steps), strict=True)]
            computing = " and ".join(f"{step - seconds:.2f}" for seconds in idle)
            measured, formula = sum(idle) / PP / step, (PP - 1) / (micro_batches + PP - 1)
            print(f"| {engine} | {micro_batches} | {computing} | {step:.2f} | {measured:.1%} | {formula:.1%} |")


def bytes_of_outputs(engine: str, deallocate: bool) -> int:
    """The most that the outputs of the first of 4 stages, whose messages do nothing at once, take in memory in a step
    of 8 micro-batches.
    """
    dist.init_process_group("fake", rank=0, world_size=4)
    config = run_config({"pp_size": 4, "pp_engine": engine}, gradient_accumulation_steps=8)
    take_step, model, loader = training_of(config, torch.device("cpu"))
    model.module.deallocate_outputs = deallocate
    outputs, most, original = [], 0, pipeline_parallel.forward_step

    def counted(*arguments: Any) -> Tensor:
        nonlocal most
        y = original(*arguments)
        outputs.append(weakref.ref(y.untyped_storage()))
        most = max(most, sum(alive.nbytes() for storage in outputs if (alive := storage()) is not None))
        return y

    pipeline_parallel.forward_step = counted
    take_step(model, loader)
    pipeline_parallel.forward_step = original
    dist.destroy_process_group()
    return most


def outputs() -> None:
    print("\nMiB of outputs in memory on the first of 4 stages with 8 micro-batches, counted\n")
    print("| | freed once sent | kept |\n|---|---|---|")
    for engine in ("afab", "1f1b"):
        freed, kept = (bytes_of_outputs(engine, deallocate) / 2**20 for deallocate in (True, False))
        print(f"| {engine} | {freed:.1f} | {kept:.1f} |")


if __name__ == "__main__":
    if ON_GPU:
        raise SystemExit("this benchmark counts on the CPU; run it with CUDA_VISIBLE_DEVICES=''")
    outputs()
    bubble(arguments(__doc__ or "").parse_args().turns)
