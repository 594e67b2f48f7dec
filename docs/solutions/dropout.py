"""Solution of an exercise of docs/numerics.md: train.py with dropout behind each MLP, equal in every layout:

    torchrun --nproc_per_node 2 -m docs.solutions.dropout --config docs/small.json --distributed.tp_size 2

It replaces three functions; in an own copy of the trainer, these are the places to change.
"""

import functools
from typing import Any

import torch
from torch import Tensor

import train
from docs.programs.broken_run import replaced
from picotron import process_group_manager as pgm
from picotron.data.loader import MicroBatchDataLoader
from picotron.model.llama import DecoderLayer, Llama
from puzzles.solutions.p22_dropout import dropout
from workbench.run.launch import exit_on_error

next_batch, llama_forward = MicroBatchDataLoader.__next__, Llama.forward


def next_with_samples(loader: Any) -> dict[str, Any]:
    """Add the numbers of the samples to a micro-batch, see `MicroBatchDataLoader`."""
    grid, size = pgm.process_group_manager, loader.micro_batch_size
    loader.count = getattr(loader, "count", -1) + 1
    step, i = divmod(loader.count, loader.grad_acc_steps)
    first = step * loader.global_batch_size + (i * grid.dp_world_size + grid.dp_rank) * size
    return next_batch(loader) | {"sample_ids": torch.arange(first, first + size)}


def forward(model: Llama, input_ids: Tensor, position_ids: Tensor, *others: Any, **options: Any) -> Tensor:
    """Give the layers the samples and the positions with `attend`, which they also get when they are recomputed."""
    attend: Any = functools.partial(options.pop("attention_fn", None) or model.attention_fn)
    samples = options.pop("sample_ids", None)
    attend.where = (samples, position_ids[0]) if model.training and samples is not None else None
    return llama_forward(model, input_ids, position_ids, *others, **options | {"attention_fn": attend})


class DroppingLayer(DecoderLayer):
    def __init__(self, config: Any, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.layer = layer
        self.mlp.register_forward_hook(self.drop)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Any = None) -> Tensor:
        self.where = attend.where
        return super().forward(x, cos, sin, attend)

    def drop(self, mlp: Any, inputs: Any, y: Tensor) -> Tensor:
        if self.where is None:
            return y
        samples, positions = self.where
        if y.size(1) < len(positions):  # sequence parallelism: this rank's part of the tokens
            grid = pgm.process_group_manager
            positions = positions.chunk(grid.tp_world_size)[grid.tp_rank]
        return dropout(y, samples, positions, self.layer)


if __name__ == "__main__":
    places = {
        "picotron.data.loader.MicroBatchDataLoader.__next__": next_with_samples,
        "picotron.model.llama.Llama.forward": forward,
        "picotron.model.llama.DecoderLayer": DroppingLayer,
    }
    with replaced(places):
        exit_on_error(train.main)
