"""Adapter of transformers' models with torch's tensor parallelism and loss parallel.

The word `torch_clip` clips with torch's `clip_grad_norm_`.
"""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from conformance import Case, Result
from conformance.adapters.loop import norm_of_mixed, torch_norm, train
from conformance.case import IGNORED, Batch

AXES = ("tp",)
CHAPTERS = ("step", "run", "float32")
LACKS = ("documents", "weights", "accumulation", "evaluation", "resume")
LAYOUTS = ("tp2 torch_clip",)
PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel()),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel()),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()),
}


def parallelize(model: Any, mesh: DeviceMesh, head: ParallelStyle) -> None:
    """Split the weights over the ranks of a mesh."""
    parallelize_module(model, mesh, {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": head})
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model: Any = case.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize(model, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))

    def backward(batch: Batch, total: Tensor) -> float:
        with loss_parallel():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch["target_ids"].flatten(), ignore_index=IGNORED)
            loss.backward()
        return loss.item()

    return train(case, dict(model.named_parameters()), backward, torch_norm if case.words else norm_of_mixed)
