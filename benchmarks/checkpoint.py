"""Checkpoints of 1.5 GB: saved and loaded by picotron and by torch.distributed.checkpoint in turns, and what saving in
the background costs training.  python -m benchmarks.checkpoint

Times are of the slowest rank until all bytes are on the disk; loading includes picotron's checksums. Extra memory is
the peak of a process during the operation over what it has before or after (whichever is more), the largest of all
ranks.
"""

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard
from transformers import LlamaConfig

from benchmarks.side_by_side import gather, machine
from benchmarks.workload import ON_GPU, arguments, device_of, loader_of, run_config
from picotron import process_group_manager as pgm
from picotron.checkpoint.checkpoint import Checkpoint
from picotron.checkpoint.writer import CheckpointWriter
from picotron.collectives import all_reduce
from picotron.data import Progress
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import Llama
from picotron.optimizer import AdamW
from picotron.parallelize import build_model
from picotron.pipeline_parallel.pipeline_parallel import hidden_states_shape
from picotron.process_group_manager import setup_process_group_manager
from picotron.run_folder import checkpoint_folder
from picotron.schedules.plan import plan_pipeline
from picotron.tokens import train_bpe
from picotron.train_step import make_train_step
from picotron.weights import fill, parameters_and_shards

LAYOUTS = {"dp 1": {}, "tp 2": {"tp_size": 2}, "pp 2": {"pp_size": 2}}
MODEL = LlamaConfig(  # 130 million parameters, of 12 bytes each with the optimizer's state
    hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
    vocab_size=32000, max_position_embeddings=256,
)  # fmt: skip
STEPS = 4


class Run:
    """A run in the middle of training, that can be saved and loaded in both ways."""

    def __init__(self, rank: int, layout: dict[str, Any], folder: Path, async_save: bool = False) -> None:
        self.folder, self.device = folder, device_of(rank)
        sizes = {"seq_length": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
        config = run_config(layout, **sizes)
        update = {"save_dir": str(folder), "async_save": async_save}
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=update)})
        grid = config.distributed
        setup_process_group_manager(grid.tp_size, grid.cp_size, grid.pp_size, grid.dp_size)
        dtype, plan = getattr(torch, config.model.dtype), plan_pipeline(config, MODEL)
        stage = build_model(config, MODEL, plan, self.device, dtype)
        self.llama: Llama = stage.module
        self.model = DataParallelBucket(stage)
        self.optimizer = AdamW(self.model.parameters(), config.training, fused=True)
        self.loader = loader_of(config, self.device)
        self.take_step = make_train_step(config, plan, hidden_states_shape(config, MODEL), self.device, dtype)
        if rank == 0:
            train_bpe(iter(["a text"]), 260).save_pretrained(folder / "tokenizer")
        dist.barrier()
        self.writer = CheckpointWriter(config, MODEL, self.llama, self.optimizer, folder / "tokenizer", "order")
        self.saved = 0
        self.step()

    def step(self) -> None:
        self.take_step(self.model, self.loader)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """The same tensors for torch: what tp ranks hold parts of as DTensors."""
        size = pgm.process_group_manager.tp_world_size
        mesh = init_device_mesh(self.device.type, (size,)) if size > 1 else None
        found: dict[str, Tensor] = {}
        for name, parameter, shard in parameters_and_shards(self.llama):
            for kind, tensor in {"model": parameter.detach(), **self.optimizer.state_of(parameter)}.items():
                sharded = shard is not None and mesh is not None
                whole = DTensor.from_local(tensor, mesh, [DTensorShard(shard.dim)]) if sharded else tensor  # type: ignore[union-attr]
                found[f"{kind}.{name}"] = whole
        return found

    def save(self) -> None:
        self.saved += 1
        self.writer.save(Progress(self.saved))

    def load(self) -> None:
        checkpoint = Checkpoint(checkpoint_folder(self.folder, self.saved))
        value = checkpoint.weights()
        for name, parameter, shard in parameters_and_shards(self.llama):
            fill(parameter.data, name, shard, value)
        checkpoint.restore(self.optimizer, self.llama)

    def torch_save(self) -> None:
        dcp.save(self.tensors(), checkpoint_id=self.folder / "dcp")

    def torch_load(self) -> None:
        dcp.load(self.tensors(), checkpoint_id=self.folder / "dcp")


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most since the last reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def largest(number: float) -> float:
    value = torch.tensor(number, dtype=torch.float64)
    all_reduce(value, None, dist.ReduceOp.MAX)
    return value.item()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the slowest rank, and bytes of extra memory of the largest."""
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = largest(time.perf_counter() - start)
    peak = memory("VmHWM")
    gc.collect()
    return seconds, largest(peak - max(before, memory("VmRSS")))


def save_and_load(rank: int, layout: dict[str, Any], folder: str, turns: int) -> dict[str, list[tuple[float, float]]]:
    """Each deletes what it wrote before the other begins, since files in memory that is in use already are cheaper."""
    run = Run(rank, layout, Path(folder))
    results: dict[str, list[tuple[float, float]]] = {"torch_save": [], "torch_load": [], "save": [], "load": []}
    for turn in range(turns + 1):
        for name, measured in results.items():
            result = timed(getattr(run, name))
            if turn:  # the first warms up
                measured.append(result)
            if name.endswith("load") and rank == 0:
                shutil.rmtree(run.folder / "dcp" if name == "torch_load" else checkpoint_folder(run.folder, run.saved))
            dist.barrier()
    return results


def in_background(rank: int, layout: dict[str, Any], folder: str, turns: int) -> dict[str, list[float]]:
    """Seconds of a few steps: alone, with a checkpoint after the first that all wait for, and with one that is written
    meanwhile (and done in the end).
    """
    now, later = (Run(rank, layout, Path(folder) / name, name == "async") for name in ("sync", "async"))
    results: dict[str, list[float]] = {"alone": [], "sync": [], "async": [], "torch": []}
    for turn in range(turns + 1):
        for name, measured in results.items():
            run, future = now if name == "sync" else later, None
            dist.barrier()
            start = time.perf_counter()
            run.step()
            if name in ("sync", "async"):
                run.save()
            elif name == "torch":
                future = dcp.async_save(run.tensors(), checkpoint_id=run.folder / "dcp")
            for _ in range(STEPS - 1):
                run.step()
            run.writer.wait()
            if future is not None:
                future.result()
            seconds = largest(time.perf_counter() - start)
            if turn:  # the first warms up
                measured.append(seconds)
            if rank == 0:
                for path in (run.folder / "dcp", checkpoint_folder(run.folder, run.saved)):
                    shutil.rmtree(path, ignore_errors=True)
            dist.barrier()
    return results


def print_save_and_load(turns: int) -> None:
    print("\n| | torch.distributed.checkpoint | picotron | ratio | extra memory, MiB: torch | picotron |")
    print("|---|---|---|---|---|---|")
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            results = gather(save_and_load, 2 if layout else 1, layout, folder, turns)[0]
        for operation in ("save", "load"):
            theirs, ours = results[f"torch_{operation}"], results[operation]
            ratio = statistics.median(a / b for (a, _), (b, _) in zip(theirs, ours, strict=True))
            seconds = [statistics.median(s for s, _ in each) for each in (theirs, ours)]
            mib = [max(m for _, m in each) / 2**20 for each in (theirs, ours)]
            print(
                f"| {name}, {operation} | {seconds[0]:.2f} s | {seconds[1]:.2f} s | {ratio:.2f} | {mib[0]:,.0f} | {mib[1]:,.0f} |"
            )


def print_in_background(turns: int) -> None:
    print(
        f"\n| {STEPS} steps, s | alone | + async_save | + torch's async_save | + saved at once |\n|---|---|---|---|---|"
    )
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            results = gather(in_background, 2 if layout else 1, layout, folder, turns)[0]
        alone = statistics.median(results["alone"])
        more = [
            statistics.median(b - a for a, b in zip(results["alone"], results[key], strict=True))
            for key in ("async", "torch", "sync")
        ]
        print(f"| {name} | {alone:.2f} | {more[0]:+.2f} | {more[1]:+.2f} | {more[2]:+.2f} |")


if __name__ == "__main__":
    options = arguments(__doc__ or "").parse_args()
    if ON_GPU and torch.cuda.device_count() < 2:
        raise SystemExit("this benchmark needs 2 GPUs; with CUDA_VISIBLE_DEVICES='' it runs on the CPU")
    print(machine())
    print_save_and_load(options.turns)
    print_in_background(max(1, options.turns // 2))
