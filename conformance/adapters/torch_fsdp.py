"""Adapter of transformers' models with torch's `fully_shard` (FSDP2)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from conformance import Case, Result
from conformance.adapters.loop import chunks, train
from conformance.case import Batch, weights_of

AXES = ("dp",)
CHAPTERS = ("step", "steps", "accumulation", "odd", "tied", "masks", "weights", "loss", "float32", "mixed")


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = case.model()
    mesh = init_device_mesh("cpu", (ranks,))
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = narrow if case.dtype == "bfloat16" else MixedPrecisionPolicy()
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def backward(batch: Batch, total: Tensor) -> float:
        pieces = chunks(chunks(batch, ranks)[rank], case.micro_batches)
        loss = torch.zeros((), dtype=torch.float64)
        for i, piece in enumerate(pieces):
            model.set_requires_gradient_sync(i == len(pieces) - 1)
            losses = case.token_losses(model(input_ids=piece["input_ids"], use_cache=False).logits, piece["target_ids"])
            part = (losses * weights_of(piece)).sum() / total
            (part * ranks).backward()  # because `fully_shard` averages over the ranks
            loss += part.detach()
        dist.all_reduce(loss)
        return loss.item()

    return train(case, dict(model.named_parameters()), backward)
