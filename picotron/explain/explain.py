"""Explain a layout of any size on one process: what each rank holds, and every message of a training step.

    python train.py --config template/base_config.json --explain

There is no second description of a step here. The step of train.py runs in a fake process group, which has any number
of ranks but only one process, with tensors on the meta device, which have shapes but no memory. For each pp rank,
the process plays the rank with dp, cp and tp rank 0; the others with this pp rank hold and send the same amounts. (With
ZeRO, the last slices of a buffer may have padding.)

The step includes clipping, the optimizer and the reductions of its metrics. It does not include the other messages of a
run: evaluations, checkpoints, and the check for stop signals.
"""

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from picotron.config import Config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel
from picotron.explain.fake_group import FakeGroup, Message, fake_rank
from picotron.metrics import global_mean, max_over_ranks
from picotron.model_config import load_model_config
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.parallelize import build_model, check_layout, unwrap
from picotron.rows import TextRows
from picotron.schedules.plan import PipelinePlan
from picotron.text_table import text_table
from picotron.train_step import make_train_step
from picotron.weights import Index

META = torch.device("meta")


class Step(NamedTuple):
    """Amounts that a rank holds between steps, and its messages in a step."""

    layers: int
    parameters: int
    weights: int  # bytes, as the next two
    gradients: int
    optimizer: int
    messages: Counter[Message]


def run_step(
    model: DataParallel, data_loader: Any, config: Config, model_config: LlamaConfig, plan: PipelinePlan
) -> Step:
    """Run a training step of this rank, and count its bytes and messages."""
    parameters = list(model.parameters())
    first = parameters[0]
    train_step = make_train_step(config, model_config, plan, first.device, first.dtype)
    optimizer = AdamW(parameters, config.training, fused=False)  # there is no fused kernel for the meta device

    weights, gradients = model.bytes_held()
    FakeGroup.messages.clear()
    loss = train_step(model, data_loader)
    clip_grad_norm(model, config.training.max_grad_norm)
    optimizer.step()
    max_over_ranks(first.device, 0.0, 0.0)  # memory and stop signals
    global_mean(loss)

    return Step(
        layers=len(unwrap(model).model.layers),
        parameters=sum(p.numel() for p in parameters),
        weights=weights,
        gradients=gradients,
        optimizer=sum(tensor.nbytes for p in parameters for tensor in optimizer.state_of(p).values()),
        messages=FakeGroup.messages.copy(),
    )


def run_rank(rank: int, config: Config, model_config: LlamaConfig, plan: PipelinePlan) -> Step:
    """Play a rank, and run its training step."""
    with fake_rank(rank, config.distributed):
        model = build_model(config, model_config, plan, META, getattr(torch, config.model.dtype), meta_weights)
        length = config.training.seq_length
        one_row = TextRows(np.zeros(length + 1, np.uint16), length)  # used again for every sample
        return run_step(model, MicroBatchDataLoader(one_row, config, META), config, model_config, plan)


def run_stages(config: Config, model_config: LlamaConfig, plan: PipelinePlan) -> list[Step]:
    """Run the step of one rank for each pp rank."""
    # Compilation and data-loader workers do not change the messages, so they are switched off.
    changes = {"training": {"compile": False}, "dataset": {"num_workers": 0}}
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in changes.items()})
    layout = config.distributed
    ranks = range(0, layout.pp_size * layout.cp_size * layout.tp_size, layout.cp_size * layout.tp_size)
    return [run_rank(rank, config, model_config, plan) for rank in ranks]


def meta_weights(name: str, shape: torch.Size, index: Index) -> Tensor:
    """A `ReadTensor` of weights without memory."""
    return torch.empty(shape, device=META)[index]


def explain(config: Config) -> None:
    """Print what each rank holds, every message of a step, and the bytes sent.

    Raises:
        UserError: the layout does not fit the model.
    """
    layout, model_config = config.distributed, load_model_config(config.model)
    plan = check_layout(config, model_config)
    steps = run_stages(config, model_config, plan)
    columns = {}  # one for neighbouring ranks with identical numbers
    for step, identical in itertools.groupby(range(layout.pp_size), key=lambda rank: steps[rank]):
        ranks = list(identical)
        columns[f"pp {ranks[0]}" + (f"-{ranks[-1]}" if len(ranks) > 1 else "")] = step
    sizes = f"dp {layout.dp_size} x pp {layout.pp_size} x cp {layout.cp_size} x tp {layout.tp_size}"
    print(f"{sizes}, {layout.world_size} ranks; {config.training.gradient_accumulation_steps} micro-batches per step")
    for title, text in (
        ("The pp ranks of a pipeline", str(plan)),
        ("What a rank holds", _holdings(columns)),
        ("Messages per step: the full tensor of each, and the number in which a rank takes part", _messages(columns)),
        ("Bytes that a rank sends per step, if collectives use a ring", _traffic(columns)),
    ):
        print(f"\n{title}:\n{text}")


def _holdings(columns: dict[str, Step]) -> str:
    rows = [["", *columns]]
    rows += [[name, *(f"{getattr(step, name):,}" for step in columns.values())] for name in ("layers", "parameters")]
    sizes = {name: [getattr(step, name) for step in columns.values()] for name in ("weights", "gradients", "optimizer")}
    sizes["total"] = list(map(sum, zip(*sizes.values(), strict=True)))
    rows += [[name, *map(_bytes, row)] for name, row in sizes.items()]
    return text_table(rows, first_number=1)


def _messages(columns: dict[str, Step]) -> str:
    found = list(dict.fromkeys(each for step in columns.values() for each in step.messages))
    axes = list(dict.fromkeys(each.axis for each in found))
    rows = [["call site", "axis", "ranks", "operation", "dtype", "shape", "size", *columns]]
    for each in sorted(found, key=lambda each: axes.index(each.axis)):
        shape, dtype = " x ".join(map(str, each.shape)) or "scalar", str(each.dtype).removeprefix("torch.")
        counts = [f"{step.messages[each]:,}" for step in columns.values()]
        rows.append(
            [each.call_site, each.axis, str(each.ranks), each.operation, dtype, shape, _bytes(each.size), *counts]
        )
    return text_table(rows, first_number=5) if found else "none: there is one rank"


def _traffic(columns: dict[str, Step]) -> str:
    rows = [["", *columns]]
    for axis in dict.fromkeys(each.axis for step in columns.values() for each in step.messages):
        sent = [
            sum(each.sent * times for each, times in step.messages.items() if each.axis == axis)
            for step in columns.values()
        ]
        rows.append([axis, *map(_bytes, sent)])
    return text_table(rows, first_number=1) if len(rows) > 1 else "nothing"


def _bytes(size: float) -> str:
    """A size with at least three significant digits: 8 B, 512 KiB, 1.25 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
