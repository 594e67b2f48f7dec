"""Adapter of transformers' Llama with torch.distributed.pipelining. The word of a layout is the name of a schedule."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from conformance import Case, Result
from conformance.adapters.loop import sum_norms, train
from conformance.adapters.stage import Stage
from conformance.case import IGNORED, Batch

AXES = ("pp",)
CHAPTERS = ("step", "run", "float32")
LACKS = ("documents", "weights", "evaluation", "resume", "tied")
ONE_STAGE, V_SHAPED = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)
LAYOUTS = tuple(f"pp2 {name}" for name in SCHEDULES if name != "1F1B")


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    rank, ranks, name = dist.get_rank(), dist.get_world_size(), (case.words or ["1F1B"])[0]
    stages = ranks if name in ONE_STAGE else 2 * ranks
    numbers = [rank] if name in ONE_STAGE else [rank, stages - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]
    model, total, losses = case.model(), torch.zeros(()), list[Tensor]()
    modules = [Stage(model, number, stages) for number in numbers]
    own = [PipelineStage(module, n, stages, torch.device("cpu")) for n, module in zip(numbers, modules, strict=True)]

    def loss_of(logits: Tensor, target_ids: Tensor) -> Tensor:
        return case.token_losses(logits, target_ids).sum() / total

    schedule: Any = get_schedule_class(name)(
        own[0] if name in ONE_STAGE else own, case.micro_batches, loss_fn=loss_of, scale_grads=False
    )

    def backward(batch: Batch, count: Tensor) -> float | None:
        nonlocal total
        total, has_loss = (batch["target_ids"] != IGNORED).sum() + 0 * count, stages - 1 in numbers
        losses.clear()
        inputs = (batch["input_ids"],) if 0 in numbers else ()
        targets = {"target": batch["target_ids"], "losses": losses} if has_loss else {}
        schedule.step(*inputs, **targets)
        return float(torch.stack(losses).sum()) if has_loss else None

    parameters = {n: p for module in modules for n, p in module.named_parameters()}
    return train(case, parameters, backward, sum_norms)
