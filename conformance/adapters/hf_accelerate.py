"""Adapter of transformers' models with accelerate: gradient accumulation with DistributedDataParallel, or FSDP2.

Words of a layout besides the size:

fsdp             FSDP2 instead of DistributedDataParallel
means            mean loss of each micro-batch, instead of its sum of losses divided by the global batch's targets
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor, nn

from conformance import Case, Result
from conformance.adapters.loop import chunks, train, whole
from conformance.case import Batch, weights_of
from conformance.reference import adamw

AXES = ("dp",)
CHAPTERS = ("step", "run", "loss", "float32", "mixed")
LACKS = ("documents", "evaluation", "resume")
LAYOUTS = ("dp2 fsdp", "dp2 means")


def run(case: Case) -> Result:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "fsdp" in case.words else None
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=case.micro_batches,
        fsdp_plugin=plugin,
    )
    rank, ranks, means = accelerator.process_index, accelerator.num_processes, "means" in case.words
    model: Any = case.model()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters(), case))

    def backward(batch: Batch, total: Tensor) -> float:
        loss = torch.zeros((), dtype=torch.float64)
        for piece in chunks(chunks(batch, ranks)[rank], case.micro_batches):
            with accelerator.accumulate(model):
                logits = model(input_ids=piece["input_ids"], use_cache=False).logits
                weights = weights_of(piece)
                losses = (case.token_losses(logits, piece["target_ids"]) * weights).sum()
                # accelerate divides by the number of micro-batches, and averages over the ranks.
                accelerator.backward(losses / weights.sum() if means else losses / total * case.micro_batches * ranks)
            loss += losses.detach() / total
        dist.all_reduce(loss)
        return float(loss)

    def clip(parameters: list[nn.Parameter], limit: float) -> float:
        return float(whole(accelerator.clip_grad_norm_(parameters, limit)))

    return train(case, dict(accelerator.unwrap_model(model).named_parameters()), backward, clip, optimizer)
