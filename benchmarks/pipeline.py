"""Two pipeline stages: picotron beside torch.distributed.pipelining on the same stages; what freeing sent outputs
saves; and how long stages are idle.  python -m benchmarks.pipeline
"""

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.side_by_side import Variant, gather, measure, print_table
from benchmarks.workload import (
    MICRO_BATCH,
    ON_GPU,
    SEQ_LENGTH,
    arguments,
    device_of,
    loader_of,
    model_config,
    ours,
    run_config,
    stage_of,
)
from picotron import process_group_manager as pgm
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.pipeline_parallel import pipeline_parallel
from picotron.pipeline_parallel.pipeline_parallel import hidden_states_shape
from train import pick_train_step

PP = 2


class TorchStage(nn.Module):
    """One of our stages as torch's schedules want it: one tensor in, one out. The loss function has the head.

    On a GPU its weights are float32, like picotron's master weights, and it computes under bf16 autocast.
    """

    def __init__(self, stage: pipeline_parallel.PipelineParallel) -> None:
        super().__init__()
        self.llama, self.is_first = stage.module, 0 in stage.stages
        self.register_buffer("positions", torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
            y = self.llama.decode(self.llama.embed(x) if self.is_first else x, self.positions)
            return y.to(torch.bfloat16) if ON_GPU else y  # what picotron's stages send each other


def torchs(rank: int, engine: str, micro_batches: int) -> Callable[[], Any]:
    """A step of PyTorch's own schedule of the same name."""
    device, config = device_of(rank), run_config({"pp_size": PP}, gradient_accumulation_steps=micro_batches)
    stage = stage_of(config, device, torch.float32)
    module = TorchStage(stage).to(device)
    pipeline = PipelineStage(module, rank, PP, device, group=pgm.process_group_manager.pp_group)

    def loss(y: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
            return stage.module.predict(y, targets)

    kind: Any = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[engine]
    schedule = kind(pipeline, micro_batches, loss_fn=loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loader = loader_of(config, device)

    def step() -> None:
        batches = [next(loader) for _ in range(micro_batches)]
        if 0 in stage.stages:
            schedule.step(torch.cat([batch["input_ids"] for batch in batches]))
        else:
            losses: list[Tensor] = []
            targets = torch.cat([batch["target_ids"] for batch in batches])
            schedule.step(target=targets, losses=losses, return_outputs=False)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square)
        torch._foreach_mul_(gradients, (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed(turns: int, steps: int) -> None:
    for micro_batches in (4, 8):
        for engine, theirs in (("afab", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
            layout = {"pp_size": PP, "pp_engine": engine}
            variants = [
                Variant(f"torch, {theirs}", torchs, (engine, micro_batches), PP),
                Variant(f"picotron, {engine}", partial(ours, gradient_accumulation_steps=micro_batches), (layout,), PP),
            ]
            print(f"\n{micro_batches} micro-batches")
            results = measure(variants, turns, steps)
            print_table(results, SEQ_LENGTH * MICRO_BATCH * micro_batches, f"torch, {theirs}")


def busy(rank: int, engine: str, micro_batches: int, turns: int) -> list[tuple[float, float]]:
    """For each of a few steps: the seconds in which this stage computes, and the seconds from its begin to its end."""
    config = run_config({"pp_size": PP, "pp_engine": engine}, gradient_accumulation_steps=micro_batches)
    device, dtype = device_of(rank), getattr(torch, config.model.dtype)
    model, loader = DataParallelBucket(stage_of(config, device, dtype)), loader_of(config, device)
    take_step = pick_train_step(config, hidden_states_shape(config, model_config()), device, dtype)
    seconds = 0.0

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        nonlocal seconds
        start = time.perf_counter()
        yield
        seconds += time.perf_counter() - start

    pipeline_parallel.action = timed
    measured = []
    for _ in range(turns + 1):
        dist.barrier()
        seconds, start = 0.0, time.perf_counter()
        take_step(model, loader)
        dist.barrier()
        measured.append((seconds, time.perf_counter() - start))
    return measured[1:]  # the first warms up


def bubble(turns: int) -> None:
    """The idle part of a step, beside the papers' formula, which supposes stages that take equally long."""
    print(
        "\n| | micro-batches | computing, s per stage | step, s | idle | (p - 1)/(m + p - 1) |\n|---|---|---|---|---|---|"
    )
    for engine in ("afab", "1f1b"):
        for micro_batches in (1, 2, 4, 8):
            stages = gather(busy, PP, engine, micro_batches, turns)
            computing = [statistics.median(seconds for seconds, _ in stage) for stage in stages]
            step = statistics.median(whole for _, whole in stages[0])
            idle, formula = 1 - sum(computing) / PP / step, (PP - 1) / (micro_batches + PP - 1)
            text = " and ".join(f"{seconds:.2f}" for seconds in computing)
            print(f"| {engine} | {micro_batches} | {text} | {step:.2f} | {idle:.1%} | {formula:.1%} |")


def bytes_of_outputs(engine: str, deallocate: bool) -> int:
    """The most that the outputs of the first of 4 stages, whose messages do nothing at once, take in memory in a step
    of 8 micro-batches.
    """
    dist.init_process_group("fake", rank=0, world_size=4)
    config = run_config({"pp_size": 4, "pp_engine": engine}, gradient_accumulation_steps=8)
    device, dtype = torch.device("cpu"), torch.float32
    stage = stage_of(config, device, dtype)
    stage.deallocate_outputs = deallocate
    model = DataParallelBucket(stage)
    outputs, most, original = [], 0, pipeline_parallel.forward_step

    def counted(*arguments: Any) -> Tensor:
        nonlocal most
        y = original(*arguments)
        outputs.append(weakref.ref(y.untyped_storage()))
        most = max(most, sum(alive.nbytes() for storage in outputs if (alive := storage()) is not None))
        return y

    pipeline_parallel.forward_step = counted
    take_step = pick_train_step(config, hidden_states_shape(config, model_config()), device, dtype)
    take_step(model, loader_of(config, device))
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
    if ON_GPU and torch.cuda.device_count() < PP:
        raise SystemExit(f"this benchmark needs {PP} GPUs; with CUDA_VISIBLE_DEVICES='' it runs on the CPU")
    options = arguments(__doc__ or "")
    if not ON_GPU:  # where the seconds of a call are those of its work, and messages need no device
        outputs()
        bubble(options.turns)
    speed(options.turns, options.steps)
