"""Adapter of transformers' models with torch's `fully_shard` (FSDP2), with torch's tensor parallelism if tp is above 1.

With the word `hsdp`, two replicas of the model are sharded over half of the dp ranks each.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from conformance import Case, Result
from conformance.adapters.loop import accumulate, chunks, norm_of_mixed, torch_norm, train
from conformance.adapters.torch_tp import parallelize
from conformance.case import Batch
from conformance.reference import logits_of

AXES = ("dp", "tp")
CHAPTERS = ("step", "run", "loss", "float32", "mixed")
LACKS = ("documents", "evaluation", "resume")
LAYOUTS = ("dp2 mixtral", "dp2 x tp2", "dp4 hsdp", "dp4 x tp2 hsdp")


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model: Any = case.model()
    ranks, tp, replicas = case.sizes["dp"], case.sizes["tp"], 2 if "hsdp" in case.words else 1
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas, tp), mesh_dim_names=("replicate", "shard", "tp"))
    rank = dist.get_rank() // tp
    if tp > 1:
        parallelize(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        if model.config.tie_word_embeddings:  # both have got a new parameter
            model.lm_head.weight = model.model.embed_tokens.weight
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = narrow if case.dtype == "bfloat16" else MixedPrecisionPolicy()
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh["replicate", "shard"] if replicas > 1 else mesh["shard"], mp_policy=policy)

    def backward(batch: Batch, total: Tensor) -> float:
        own = chunks(batch, ranks)[rank]  # `fully_shard` averages over the ranks
        loss = accumulate(case, own, total, lambda x: logits_of(model, x), ranks, model.set_requires_gradient_sync)
        dist.all_reduce(loss)
        return loss.item() / tp

    return train(case, dict(model.named_parameters()), backward, norm_of_mixed if tp > 1 else torch_norm)
