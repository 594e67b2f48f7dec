"""What a layout comes to, of any size, on one process: what each rank holds, and every message of a training step.

    python train.py --config template/base_config.json --explain

Nothing here knows what a step does: it is the step of train.py that runs, in a fake process group, which has any number
of ranks but nobody in them, with tensors on the meta device, which have a shape but no memory. One rank of each stage
is played, that with dp, cp and tp rank 0: the others of the stage hold and send as much.

The step includes clipping, the optimizer and the reductions of its metrics. What else a run sends (evaluations,
checkpoints, whether somebody got a signal) is not in it.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from picotron.check import check_layout
from picotron.config import Config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.fake_group import FakeGroup, Message
from picotron.metrics import global_mean, peak_memory
from picotron.model import load_model_config
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, hidden_states_shape
from picotron.pipeline_parallel.plan import Plan
from picotron.process_group_manager import setup_process_group_manager
from picotron.weights import Index

META = torch.device("meta")


class Step(NamedTuple):
    """What a rank holds, and its messages of a step."""

    layers: int
    parameters: int
    weights: int  # this and the next two in bytes
    gradients: int
    optimizer: int
    messages: Counter[Message]


def take_a_step(
    stage: PipelineParallel,
    data_loader: Any,
    config: Config,
    model_config: LlamaConfig,
    plan: Plan,
    pick_train_step: Callable[..., Any],
) -> Step:
    """The step of this rank, in the process group and on the device that there are."""
    first = next(stage.parameters())
    model = DataParallelBucket(stage, groups=stage.parameters_by_stage())
    tensor_shapes = hidden_states_shape(config, model_config)
    take_step = pick_train_step(config, plan, tensor_shapes, first.device, first.dtype)
    optimizer = AdamW(model.parameters(), config.training, fused=False)  # there is no fused kernel for the meta device

    FakeGroup.messages.clear()
    loss = take_step(model, data_loader)
    clip_grad_norm(model, config.training.max_grad_norm)
    optimizer.step()
    peak_memory(first.device)
    global_mean(loss)

    parameters = list(model.parameters())
    return Step(
        layers=sum(len(each.layers) for each in stage.stages.values()),
        parameters=sum(p.numel() for p in parameters),
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.main_grad.nbytes for p in parameters),
        optimizer=sum(tensor.nbytes for p in parameters for tensor in optimizer.state_of(p).values()),
        messages=FakeGroup.messages.copy(),
    )


def play(
    rank: int,
    config: Config,
    model_config: LlamaConfig,
    plan: Plan,
    build_model: Callable[..., Any],
    pick_train_step: Callable[..., Any],
) -> Step:
    """The step of any rank, alone."""
    layout, dtype = config.distributed, getattr(torch, config.model.dtype)
    dist.init_process_group("nobody", store=dist.HashStore(), rank=rank, world_size=layout.world_size)
    try:
        setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
        checkpoint = SimpleNamespace(weights=lambda: shape_of_weights)
        stage = build_model(config, model_config, plan, META, dtype, checkpoint)
        one_sequence = np.zeros(config.training.seq_length + 1, np.uint16)  # again and again
        data_loader = MicroBatchDataLoader(one_sequence, config, META)
        return take_a_step(stage, data_loader, config, model_config, plan, pick_train_step)
    finally:
        dist.destroy_process_group()


def play_stages(config: Config, model_config: LlamaConfig, plan: Plan, *functions: Callable[..., Any]) -> list[Step]:
    """The steps of one rank of each pipeline stage."""
    # Neither compiled code nor processes that read data send any messages.
    changes = {"training": {"compile": False}, "dataset": {"num_workers": 0}}
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in changes.items()})
    layout = config.distributed
    ranks = range(0, layout.pp_size * layout.cp_size * layout.tp_size, layout.cp_size * layout.tp_size)
    return [play(rank, config, model_config, plan, *functions) for rank in ranks]


def shape_of_weights(name: str, shape: torch.Size, index: Index) -> Tensor:
    """For `materialise`."""
    return torch.empty(shape, device=META)[index]


def explain(config: Config, build_model: Callable[..., Any], pick_train_step: Callable[..., Any]) -> None:
    """Print tables of what each rank holds, of every message of a step, and of their bytes.

    Args:
        build_model, pick_train_step: train.py's.

    Raises:
        UserError: the layout does not fit the model.
    """
    layout, model_config = config.distributed, load_model_config(config.model)
    plan = check_layout(config, model_config)
    steps = play_stages(config, model_config, plan, build_model, pick_train_step)
    columns = {}  # one for neighbours that are alike
    for step, alike in itertools.groupby(range(layout.pp_size), key=lambda rank: steps[rank]):
        ranks = list(alike)
        columns[f"pp {ranks[0]}" + (f"-{ranks[-1]}" if len(ranks) > 1 else "")] = step
    sizes = f"dp {layout.dp_size} x pp {layout.pp_size} x cp {layout.cp_size} x tp {layout.tp_size}"
    print(f"{sizes}, {layout.world_size} ranks; {config.training.gradient_accumulation_steps} micro-batches per step")
    for title, text in (
        ("The ranks of a pipeline", str(plan)),
        ("What a rank holds", _holdings(columns)),
        ("The messages of a step: the whole tensor of each, and how many a rank takes part in", _messages(columns)),
        ("What a rank sends in a step, if collectives go around a ring", _traffic(columns)),
    ):
        print(f"\n{title}:\n{text}")


def _holdings(columns: dict[str, Step]) -> str:
    rows = [["", *columns]]
    rows += [[name, *(f"{getattr(step, name):,}" for step in columns.values())] for name in ("layers", "parameters")]
    sizes = {name: [getattr(step, name) for step in columns.values()] for name in ("weights", "gradients", "optimizer")}
    sizes["together"] = list(map(sum, zip(*sizes.values(), strict=True)))
    rows += [[name, *map(_bytes, row)] for name, row in sizes.items()]
    return _table(rows, first_number=1)


def _messages(columns: dict[str, Step]) -> str:
    found = list(dict.fromkeys(each for step in columns.values() for each in step.messages))
    axes = list(dict.fromkeys(each.axis for each in found))
    rows = [["where", "axis", "ranks", "operation", "dtype", "shape", "size", *columns]]
    for each in sorted(found, key=lambda each: axes.index(each.axis)):
        shape, dtype = " x ".join(map(str, each.shape)) or "scalar", str(each.dtype).removeprefix("torch.")
        counts = [f"{step.messages[each]:,}" for step in columns.values()]
        rows.append([each.where, each.axis, str(each.ranks), each.operation, dtype, shape, _bytes(each.size), *counts])
    return _table(rows, first_number=5) if found else "none: there is one rank"


def _traffic(columns: dict[str, Step]) -> str:
    rows = [["", *columns]]
    for axis in dict.fromkeys(each.axis for step in columns.values() for each in step.messages):
        sent = [
            sum(each.sent * times for each, times in step.messages.items() if each.axis == axis)
            for step in columns.values()
        ]
        rows.append([axis, *map(_bytes, sent)])
    return _table(rows, first_number=1) if len(rows) > 1 else "nothing"


def _bytes(size: float) -> str:
    """With three digits or more: 8 B, 512 KiB, 1.25 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def _table(rows: Sequence[Sequence[str]], first_number: int) -> str:
    """Columns of text, then columns of numbers, which are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < first_number else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
