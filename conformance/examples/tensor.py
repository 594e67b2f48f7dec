"""Tensor parallelism in plain torch: each rank has some heads and some hidden units of every layer.

Shoeybi et al. 2019, arXiv:1909.08053. Embedding, norms and head are whole on every rank.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import Case, Part, Result
from conformance.adapters.loop import accumulate, sum_norms, train
from conformance.case import Batch
from conformance.reference import logits_of

AXES = ("tp",)
CHAPTERS = ("step", "run", "loss", "float32")
LACKS = ("evaluation", "resume")
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


class Pair(torch.autograd.Function):
    """forward: one of the functions below. backward: the function that its gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
        ctx.communicate = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicate(gradient), None, None


def copy(x: Tensor) -> Tensor:
    return x.view_as(x)


def all_reduce(partial: Tensor) -> Tensor:
    full = partial.clone()  # dist.all_reduce works in place, and partial belongs to autograd
    dist.all_reduce(full)
    return full


def split(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Keep this rank's rows of column-parallel matrices, and its columns of row-parallel ones.

    Returns:
        For each of them, the dimension that is split, and the place of this rank's first row or column.
    """
    rank, ranks, places = dist.get_rank(), dist.get_world_size(), dict[str, tuple[int, int]]()
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in COLUMN_PARALLEL + ROW_PARALLEL:
            weight, dim = module.get_parameter("weight"), int(kind in ROW_PARALLEL)
            shards = weight.detach().chunk(ranks, dim)
            places[f"{name}.weight"] = dim, sum(shard.size(dim) for shard in shards[:rank])
            weight.data = shards[rank].clone()
        if kind in COLUMN_PARALLEL:
            module.register_forward_pre_hook(lambda _, inputs: Pair.apply(*inputs, copy, all_reduce))
        if kind in ROW_PARALLEL:
            module.register_forward_hook(lambda _, inputs, output: Pair.apply(output, all_reduce, copy))
    return places


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model, ranks = case.model(), dist.get_world_size()
    case.require(model.config.model_type == "llama", "biases and norms of heads are not split")
    case.require(model.config.num_key_value_heads % ranks == 0, "ranks would share key/value heads")
    places, parameters = split(model), dict(model.named_parameters())
    shards = {parameters[name] for name in places}

    def backward(batch: Batch, total: Tensor) -> float:
        return float(accumulate(case, batch, total, lambda piece: logits_of(model, piece)))  # the same on all ranks

    def parts(own: Mapping[str, Any]) -> dict[str, Tensor | Part]:
        """Return each tensor with the place of its first element in the whole one."""
        starts = {name: (0, start) if dim else (start, 0) for name, (dim, start) in places.items()}
        return {name: Part(x, starts[name]) if name in starts else x for name, x in own.items()}

    clip = functools.partial(sum_norms, share=lambda p: 1.0 if p in shards else 1 / ranks)  # replicas count once
    result = train(case, parameters, backward, clip)
    result.gradients, result.weights = [parts(each) for each in result.gradients], parts(result.weights)
    return result
