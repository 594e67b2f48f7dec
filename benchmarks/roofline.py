"""Estimate of the time of a training step on a GPU that this machine need not have: every operation, priced.

    python -m benchmarks.roofline --model llama-3.2-1b --hardware H200
    python -m benchmarks.roofline --model smollm-1.7b --distributed.tp_size 2 --training.activation_checkpointing full

The real step of rank 0 runs on a fake GPU (see benchmarks/gpu/fake_cuda.py). The prices of its operations are those of
`Hardware`, from which `train.py --explain` forecasts the same step by formulas; the last line compares both. This is an
estimate: it knows nothing of caches, of uneven shapes, or of time in which the GPU waits for the CPU, and communication
does not overlap computation.

With torch.compile, neighbouring element-wise operations become one kernel, which reads what comes from outside and
writes what is needed outside. A row of logits does not fit into one part of the GPU, so the softmax of the loss reads
it three times: for the largest logit, for the sum and for the gradient. The second column estimates that.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from benchmarks.gpu.fake_cuda import fake_cuda_rank, obstacle, restart_with_fake_cuda
from benchmarks.shapes import SHAPES
from picotron.config import Config
from picotron.console import UserError, text_table
from picotron.model.flops import model_cost
from picotron.optimizer.optimizer import clip_grad_norm
from picotron.run.config_reader import apply_overrides, parse_config
from picotron.run.metrics import peak_flops
from picotron.run.model_config import load_model_config
from workbench.explain.fake_group import FakeGroup
from workbench.explain.hardware import HARDWARE, Hardware
from workbench.explain.step_time import forecast
from workbench.pipelines.engine import plan_pipeline

BATCHES = {  # a micro-batch of 8,192 tokens
    "smollm-1.7b": {"seq_length": 2048, "micro_batch_size": 4},
    "llama-3.2-1b": {"seq_length": 4096, "micro_batch_size": 2},
}
SOFTMAX = "softmax of the loss"
ELEMENTWISE = ("norms", "rotation, SwiGLU, residuals", SOFTMAX)  # what torch.compile fuses
GROUPS = (
    "matrices", "attention", *ELEMENTWISE, "products of the loss", "gradient accumulation", "communication", "clipping",
    "AdamW", "start of a step",
)  # fmt: skip
CALLERS = {  # (file, function) on the stack: group of the operations below it
    ("cross_entropy.py", "chunk_loss"): SOFTMAX,
    ("cross_entropy.py", "forward"): "products of the loss",
    ("cross_entropy.py", "backward"): "products of the loss",
    ("data_parallel.py", "_accumulate"): "gradient accumulation",
    ("optimizer.py", "clip_grad_norm"): "clipping",
    ("optimizer.py", "step"): "AdamW",
    ("optimizer.py", "zero_grad"): "AdamW",
}
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_local_scalar_dense")


class Operation(NamedTuple):
    """An operation on the GPU.

    Args:
        group: one of GROUPS.
        seconds: estimate of its time if it runs alone.
        reads, writes: bytes, by storage.
    """

    group: str
    seconds: float
    reads: dict[int, int]
    writes: dict[int, int]


class Recorder(TorchDispatchMode):
    """Prices every operation that it sees."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self.hardware = hardware
        self.operations: list[Operation] = []
        self.storages: list[Any] = []  # kept, so that no two have the same address

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__ if hasattr(function, "overloadpacket") else str(function)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_cuda]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_cuda]
        if name in FREE or not (inputs or outputs):
            return result
        changed = self._changed(function, args, kwargs or {})
        given = {each.untyped_storage()._cdata for each in inputs}
        new = [each for each in outputs if each.untyped_storage()._cdata not in given]
        if new or changed:  # otherwise it only makes a view
            self._add(name, inputs, [*changed, *new])
        return result

    @staticmethod
    def _changed(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        """Inputs that the operation changes in place."""
        changed = []
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
        return [each for each in changed if isinstance(each, Tensor) and each.is_cuda]

    def _add(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.storages += [each.untyped_storage() for each in outputs]
        reads, writes = _bytes(inputs), _bytes(outputs)
        moved = sum(reads.values()) + sum(writes.values())
        if name in ("gather", "embedding", "index", "index_select"):  # reads only the chosen rows
            moved = 2 * sum(writes.values())
        elif name == "index_put_":
            moved = 3 * min(each.nbytes for each in inputs)  # the indices
        hardware = self.hardware
        seconds = max(hardware.move(moved), hardware.launch)
        if name in PRODUCTS:
            a, b = [each for each in inputs if each.dim() >= 2 and not any(each is out for out in outputs)][-2:]
            dtype = str(a.dtype).removeprefix("torch.")
            flops = 2 * a.numel() * b.size(-1) * hardware.waves(a.numel() // a.size(-1), b.size(-1))
            seconds = max(hardware.product(dtype, flops, moved), hardware.launch)
        elif name == "_scaled_mm":  # float8, of which GPUs compute twice as many per second
            flops = 2 * inputs[0].numel() * inputs[1].size(-1)
            seconds = max(hardware.product("bfloat16", flops / 2, moved), hardware.launch)
        elif "scaled_dot_product" in name:
            backward = "backward" in name
            q, k = inputs[1:3] if backward else inputs[:2]  # the first input of backward is a gradient
            product = 2 * q.numel() * k.size(2) / 2  # FLOPs of q k', half of which are masked
            dtype = str(q.dtype).removeprefix("torch.")
            seconds = max(hardware.attend(dtype, (5 if backward else 2) * product, backward), hardware.launch)
        self.operations.append(Operation(_group(name), seconds, reads, writes))

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        """Context of a step. Adds the time of its messages, one after the other."""
        FakeGroup.messages.clear()
        yield
        for message, count in FakeGroup.messages.items():
            n = message.ranks
            seconds = self.hardware.collective(n, n, count, n - 1, count * message.sent)
            self.operations.append(Operation("communication", seconds, {}, {}))


def _bytes(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of tensors by storage. (A bucket is the storage of several gradients.)"""
    sizes: dict[int, int] = defaultdict(int)
    for each in tensors:
        sizes[each.untyped_storage()._cdata] += each.numel() * each.itemsize
    return sizes


def _group(name: str) -> str:
    """Group of an operation, from the stack and from its name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # a hook of autograd is the first frame of its thread
        caller = frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name
        if caller in CALLERS:
            return CALLERS[caller]
        frame = frame.f_back
    if name in (*PRODUCTS, "_scaled_mm"):
        return "matrices"
    if "scaled_dot_product" in name:
        return "attention"
    return "norms" if "norm" in name else "rotation, SwiGLU, residuals"


def eager(operations: list[Operation]) -> dict[str, float]:
    """Seconds of each group."""
    seconds = dict.fromkeys(GROUPS, 0.0)
    for operation in operations:
        seconds[operation.group] += operation.seconds
    return seconds


def compiled(operations: list[Operation], hardware: Hardware) -> dict[str, float]:
    """Seconds of each group if neighbouring element-wise operations are one kernel. Its time is divided among its
    groups in proportion to the times of their separate operations.
    """
    last_read = {storage: i for i, operation in enumerate(operations) for storage in operation.reads}
    seconds = dict.fromkeys(GROUPS, 0.0)
    kernel: list[int] = []
    for i, operation in enumerate([*operations, None]):
        if operation is not None and operation.group in ELEMENTWISE:
            kernel.append(i)
            continue
        if kernel:
            written: dict[int, int] = {}
            moved = 0
            for j in kernel:
                moved += sum(size for storage, size in operations[j].reads.items() if storage not in written)
                written |= operations[j].writes
            needed = sum(size for storage, size in written.items() if last_read.get(storage, 0) > kernel[-1])
            moved = 4 * needed if operations[kernel[0]].group == SOFTMAX else moved + needed
            separate = defaultdict(float)
            for j in kernel:
                separate[operations[j].group] += operations[j].seconds
            fused = min(max(hardware.move(moved), hardware.launch), sum(separate.values()))
            for group, part in separate.items():
                seconds[group] += fused * part / sum(separate.values())
            kernel = []
        if operation is not None:
            seconds[operation.group] += operation.seconds
    return seconds


def record(config: Config, model_config: LlamaConfig, hardware: Hardware) -> list[Operation]:
    """Return the operations of a training step of rank 0: the second one, because the first one creates states."""
    recorder = Recorder(hardware.in_step(config.distributed.world_size))
    with fake_cuda_rank(config, model_config, device_name=hardware.name) as run:
        for step in range(2):
            with recorder if step else contextlib.nullcontext(), recorder.communication():
                run.train_step(run.model, run.data_loader)
                clip_grad_norm(run.model, config.training.max_grad_norm)
                run.optimizer.step()
                run.optimizer.zero_grad()
            if step == 0:
                recorder.operations.clear()
    start = Operation("start of a step", hardware.step(config.distributed.world_size), {}, {})
    return [*recorder.operations, start]


def report(config: Config, model_config: LlamaConfig, hardware: Hardware) -> str:
    """Format the table of a step, with a bar for each group, and the MFU."""
    operations = record(config, model_config, hardware)
    columns = [eager(operations), compiled(operations, hardware)]
    totals = [sum(column.values()) for column in columns]
    rows = [["", "eager, ms", "share", "compiled, ms", "share", ""]]
    for group in GROUPS:
        cells = [
            f"{column[group] * 1e3:,.1f}  {column[group] / total:.1%}".split("  ")
            for column, total in zip(columns, totals, strict=True)
        ]
        rows.append([group, *cells[0], *cells[1], "#" * round(40 * columns[1][group] / totals[1])])
    rows.append(["total", f"{totals[0] * 1e3:,.1f}", "", f"{totals[1] * 1e3:,.1f}", "", ""])
    training = config.training
    tokens = config.global_batch_size * training.seq_length / config.distributed.world_size
    flops, peak = (
        model_cost(model_config, training.seq_length).flops * tokens,
        peak_flops(hardware.name, torch.bfloat16),
    )
    assert peak is not None
    rows.append(["MFU", *(cell for total in totals for cell in (f"{flops / total / peak:.1%}", "")), ""])
    times = []
    for compiles in (False, True):
        changed = config.model_copy(update={"training": training.model_copy(update={"compile": compiles})})
        times.append(forecast(changed, model_config, plan_pipeline(changed, model_config), hardware).step_time)
    rows.append(["forecast by formulas, ms", *(cell for each in times for cell in (f"{each * 1e3:,.1f}", "")), ""])
    differences = [each / total - 1 for each, total in zip(times, totals, strict=True)]
    rows.append(["difference", *(cell for each in differences for cell in (f"{each:+.1%}", "")), ""])
    return text_table(rows, first_number=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="keys of the config can be overridden as for train.py, such as --distributed.tp_size 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm-1.7b", help=f"{', '.join(SHAPES)}, a folder or a hub id [%(default)s]"
    )
    parser.add_argument("--hardware", choices=HARDWARE, default="H200", help="[%(default)s]")
    options, overrides = parser.parse_known_args()
    if problem := obstacle():
        sys.exit(f"error: {problem}")
    restart_with_fake_cuda()
    with tempfile.TemporaryDirectory() as folder:
        if options.model in SHAPES:
            Path(folder, "config.json").write_text(json.dumps({"model_type": "llama", **SHAPES[options.model]}))
        name = folder if options.model in SHAPES else options.model
        data: dict[str, Any] = {
            "distributed": {},
            "model": {"name": name, "dtype": "bfloat16"},
            "training": {"gradient_accumulation_steps": 4, **BATCHES.get(options.model, {})},
            "dataset": {"name": "python-stdlib"},
            "checkpoint": {"save_dir": folder},
        }
        try:
            apply_overrides(data, overrides)
            config, hardware = parse_config(data), HARDWARE[options.hardware]
            table = report(config, load_model_config(config.model), hardware)
        except UserError as error:
            sys.exit(f"error: {error}")
    training = config.training
    print(
        f"Estimate for {options.model} on {hardware.name}: {training.gradient_accumulation_steps} micro-batches of "
        f"{training.micro_batch_size} x {training.seq_length} tokens, {config.model.dtype}; nothing ran on a GPU\n\n{table}"
    )


if __name__ == "__main__":
    main()
