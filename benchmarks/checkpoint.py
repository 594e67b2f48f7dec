"""Checkpoints of 1.5 GB: time and memory to save and load, compared with torch.distributed.checkpoint (DCP).

python -m benchmarks.checkpoint

Times are those of the slowest rank, until all bytes are on the disk. Loading includes the check of picotron's
checksums. Extra memory is the peak of a process during the operation minus its memory before or after it, whichever is
more; the table has the maximum over the ranks.
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
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig

from benchmarks.side_by_side import DifferentResults, gather, print_markdown
from benchmarks.workload import TINY, arguments, device_of, model_config, require_gpus, run_config, training_of
from picotron import process_group_manager as pgm
from picotron.model.placement import placement
from picotron.model.weights import read_owned_weights
from picotron.optimizer import AdamW
from picotron.parallelize import unwrap
from workbench.prepare.tokens import train_bpe
from workbench.run.checkpoint.checkpoint import Checkpoint
from workbench.run.checkpoint.writer import CheckpointWriter
from workbench.run.metrics import Progress, max_over_ranks
from workbench.run.run_folder import checkpoint_folder
from workbench.run.with_keys import with_keys

LAYOUTS = {"dp 1": {}, "tp 2": {"tp_size": 2}, "pp 2": {"pp_size": 2}}
MODEL = model_config() if TINY else LlamaConfig(  # 125 million parameters; 12 bytes each, with the optimizer's state
    hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
    vocab_size=32000, max_position_embeddings=256,
)  # fmt: skip


class Run:
    """A run after its first step, which picotron and DCP can save and load."""

    def __init__(self, rank: int, layout: dict[str, Any], folder: Path) -> None:
        self.folder, self.device = folder, device_of(rank)
        sizes = {"seq_length": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
        config = with_keys(run_config(layout, **sizes), checkpoint={"save_dir": str(folder)})
        step, self.model, loader = training_of(config, self.device, MODEL)
        self.llama = unwrap(self.model)
        self.optimizer = AdamW(self.model, config.training, fused=True)
        step(self.model, loader)
        self.optimizer.step()
        if rank == 0:
            train_bpe(iter(["a text"]), 260).save_pretrained(folder / "tokenizer")  # every checkpoint has a copy of it
        dist.barrier()
        self.writer = CheckpointWriter(config, MODEL, self.llama, self.optimizer, folder / "tokenizer", "fingerprint")
        self.saved = 0

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of picotron's checkpoint for DCP, those that are sharded over tp ranks as DTensors."""
        size = pgm.process_group_manager.tp_world_size
        mesh = init_device_mesh(self.device.type, (size,)) if size > 1 else None
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.llama.named_parameters():
            shard = placement(parameter).shard
            for kind, each in {"model": parameter, **self.optimizer.state_of(parameter)}.items():
                tensor = each.detach()  # master weights need gradients, too
                sharded = shard is not None and mesh is not None
                tensors[f"{kind}.{name}"] = DTensor.from_local(tensor, mesh, [Shard(shard.dim)]) if sharded else tensor
        return tensors

    def local_tensors(self) -> list[Tensor]:
        """Return the same tensors, of sharded ones this rank's shard."""
        return [each.to_local() if isinstance(each, DTensor) else each for each in self.tensors().values()]

    def save(self) -> None:
        self.saved += 1
        self.writer.save(Progress(self.saved))

    def load(self) -> None:
        checkpoint = Checkpoint(checkpoint_folder(self.folder, self.saved))
        with torch.no_grad():
            read_owned_weights(self.llama, checkpoint.weights())
        checkpoint.restore(self.optimizer, self.llama)

    def torch_save(self) -> None:
        dcp.save(self.tensors(), checkpoint_id=self.folder / "dcp")

    def torch_load(self) -> None:
        dcp.load(self.tensors(), checkpoint_id=self.folder / "dcp")


def memory(field: str) -> int:
    """Return the bytes of this process: VmRSS is the current size, VmHWM its peak since the last reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def measured(operation: Callable[[], None], device: torch.device) -> list[float]:
    """Return the seconds of an operation and the bytes of extra memory, both as the maximum over the ranks."""
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    dist.barrier()
    start = time.perf_counter()
    operation()
    seconds, peak = time.perf_counter() - start, memory("VmHWM")
    gc.collect()
    return max_over_ranks(device, seconds, peak - max(before, memory("VmRSS"))).tolist()


def check_load(run: Run, load: Callable[[], None]) -> None:
    """Set all tensors to 0, load them, and compare their sums with those before.

    Raises:
        DifferentResults: at least one sum differs.
    """
    expected = [tensor.sum(dtype=torch.float64).item() for tensor in run.local_tensors()]
    for tensor in run.local_tensors():
        tensor.zero_()
    load()
    loaded = [tensor.sum(dtype=torch.float64).item() for tensor in run.local_tensors()]
    if expected != loaded:
        raise DifferentResults(f"{load.__qualname__}: {sum(expected)} was saved, {sum(loaded)} was loaded")


def save_and_load(rank: int, layout: dict[str, Any], folder: str, turns: int) -> dict[str, list[list[float]]]:
    """Measure the four operations in turns. Files are deleted after loading, because overwriting files that are in the
    page cache would be faster.
    """
    run = Run(rank, layout, Path(folder))
    results: dict[str, list[list[float]]] = {"torch_save": [], "torch_load": [], "save": [], "load": []}
    for turn in range(turns + 1):
        for name, measurements in results.items():
            operation = getattr(run, name)
            if turn:
                measurements.append(measured(operation, run.device))
            elif name.endswith("load"):  # the first turn is a warm-up
                check_load(run, operation)
            else:
                operation()
            dist.barrier()  # other ranks may still read the files
            if name.endswith("load") and rank == 0:
                shutil.rmtree(run.folder / "dcp" if name == "torch_load" else checkpoint_folder(run.folder, run.saved))
            dist.barrier()
    return results


def print_save_and_load(turns: int) -> None:
    memory_columns = ["DCP, extra memory, MiB", "picotron, extra memory, MiB"]
    rows = [["", "DCP, s", "picotron, s", "DCP's time / picotron's", *memory_columns]]
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            results = gather(save_and_load, 2 if layout else 1, layout, folder, turns)[0]
        for operation in ("save", "load"):
            dcp_and_picotron = results[f"torch_{operation}"], results[operation]
            ratio = statistics.median(a / b for (a, _), (b, _) in zip(*dcp_and_picotron, strict=True))
            seconds = [f"{statistics.median(s for s, _ in each):.2f}" for each in dcp_and_picotron]
            mib = [f"{max(size for _, size in each) / 2**20:,.0f}" for each in dcp_and_picotron]
            rows.append([f"{name}, {operation}", *seconds, f"{ratio:.2f}", *mib])
    print_markdown(rows)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    require_gpus(2)
    print_save_and_load(options.turns)


if __name__ == "__main__":
    main()
