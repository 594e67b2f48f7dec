"""Training steps on a fake GPU, and a report of each: what makes the CPU wait, and which operations mix devices.

    python -m tests.support.fake_cuda_steps "tp8 sequence parallel" "pp2 zbv"

prints a line of JSON for each of these layouts: its name and the reports of its ranks. Names are those of `LAYOUTS`
and `MEMORY`.
"""

import contextlib
import json
import sys
import traceback
from collections import Counter, defaultdict
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from benchmarks.gpu.fake_cuda import fake_cuda_rank, restart_with_fake_cuda
from benchmarks.gpu.fake_cuda_memory import measure
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.model.packed import PackedDocuments
from picotron.optimizer.optimizer import clip_grad_norm
from picotron.run.metrics import global_mean
from picotron.run.progress import Progress
from tests.support.fake_cuda_layouts import LAYOUTS, MEMORY, ranks_of

COPIES = {"aten._to_copy.default", "aten.copy_.default"}


def place(frame: FrameType | None) -> str:
    """Return the innermost function of picotron on the stack, or "autograd" if there is none, as in backward."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("picotron."):
            return f"{module.rpartition('.')[2]}.py {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"


class Waits(TorchDispatchMode):
    """Counter of the operations that make the CPU wait for a GPU, and of those that mix devices.

    Operations whose result has a data-dependent shape, such as boolean indexing, wait, too; FakeTensorMode raises an
    error for most of them.

    Attributes:
        phase: the part of the step that runs.
        found: operations and their places in the code, by phase.
        copies: copies without a wait.
        attention: the kernels of attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.found: dict[str, Counter[str]] = defaultdict(Counter)
        self.copies: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if "_attention" in name:
            self.attention[name] += 1
        if name.startswith("prim."):  # a question about a tensor, such as its device
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if name in COPIES:
            self.note_copy(name, args, kwargs)
        elif name == "aten._local_scalar_dense.default":
            if "cuda" in devices:
                self.note("item")
            return 1.0 if tensors[0].is_floating_point() else 1  # a fake tensor has no value
        elif name == "aten.fill_.Tensor":
            pass  # x[i] = 0.0 passes the number as a tensor on the CPU, from which a GPU's kernel gets it without a wait
        elif len(devices) > 1:
            self.note(f"{name} mixes devices")
        elif name.startswith("aten.index") and "cuda" in devices and any(t.dtype == torch.bool for t in tensors[1:]):
            self.note(f"{name} has a boolean index")
        return func(*args, **kwargs)

    def note_copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "aten.copy_.default":
            tensor, target = args[1], args[0].device.type
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            tensor, target = args[0], torch.device(kwargs.get("device") or args[0].device).type
            asynchronous = kwargs.get("non_blocking", False)
        source = tensor.device.type
        if source == target:
            return
        if asynchronous and (source == "cuda" or hasattr(tensor, "marked_as_pinned")):
            self.copies[f"{source} to {target} in {place(sys._getframe())}"] += 1
        else:
            self.note(f"copy from {source} to {target}")

    def note(self, text: str) -> None:
        self.found[self.phase][f"{text} in {place(sys._getframe())}"] += 1


def packed_micro_batches() -> Any:
    """Give each micro-batch what fine-tuning data have. Its boundaries are those of `packed_documents`."""
    load = MicroBatchDataLoader.__next__

    def load_and_pack(loader: MicroBatchDataLoader) -> dict[str, Any]:
        batch = load(loader)
        batch["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
        batch["target_weights"] = torch.ones_like(batch["input_ids"], dtype=torch.float64)
        return batch

    return mock.patch.object(MicroBatchDataLoader, "__next__", load_and_pack)


def packed_documents(config: Config) -> Any:
    """Let `PackedDocuments.of` return three documents per row: fake tensors have no numbers for it to read."""
    length, rows = config.training.seq_length, config.training.micro_batch_size
    starts = [row * length + position for row in range(rows) for position in (0, 5, length // 2 + 3)]

    def of(cu_seqlens: Tensor, device: torch.device) -> PackedDocuments:
        boundaries = (*starts, rows * length)
        return PackedDocuments(boundaries, torch.empty(len(boundaries), dtype=torch.int32, device=device))

    return mock.patch.object(PackedDocuments, "of", of)


def report(config: Config, model_config: LlamaConfig, rank: int) -> dict[str, Any]:
    """Run an evaluation and a training step of a rank, as in the loop of train.py, and report what `Waits` found."""
    waits, error = Waits(), None
    try:
        with fake_cuda_rank(config, model_config, rank) as run, waits:
            waits.phase = "evaluation"
            global_mean(run.evaluate(run.model, run.data_loader))
            waits.phase = "train_step"
            loss = run.train_step(run.model, run.data_loader)
            waits.phase = "optimizer"
            norm = clip_grad_norm(run.model, config.training.max_grad_norm)
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
            waits.phase = "metrics"
            run.metrics.end_step(Progress().after_step(config), loss, norm, 1e-3)
    except Exception:
        error = f"{waits.phase}: {traceback.format_exc()}"
    return {"rank": rank, "error": error, "found": waits.found, "copies": waits.copies, "attention": waits.attention}


def play(name: str) -> list[dict[str, Any]]:
    """Return the reports of all ranks of a layout that differ."""
    layout = MEMORY.get(name) or LAYOUTS[name]
    config, model_config = layout.configs()
    run = measure if name in MEMORY else report
    with packed_micro_batches() if layout.packed else contextlib.nullcontext(), packed_documents(config):
        return [run(config, model_config, rank) for rank in ranks_of(config.distributed)]


def main() -> None:
    restart_with_fake_cuda()
    for name in sys.argv[1:] or [*LAYOUTS, *MEMORY]:
        print(json.dumps({name: play(name)}), flush=True)


if __name__ == "__main__":
    main()
