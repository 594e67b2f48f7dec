"""Adapter of transformers' Llama with torch.distributed.pipelining. The word of a layout is the name of a schedule."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from conformance import Case, Result
from conformance.adapters.loop import train
from conformance.case import IGNORED, Batch

AXES = ("pp",)
CHAPTERS = ("step", "steps", "accumulation", "odd", "masks", "float32")
ONE_STAGE, V_SHAPED = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)
LAYOUTS = tuple(f"pp2 {name}" for name in SCHEDULES if name != "1F1B")


class Stage(nn.Module):
    """Some layers of a model; the first stage also has the embedding, the last one the norm and the head."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.model: Any
        self.lm_head: Any
        self.rotary: Any
        layers = len(model.model.layers) // stages
        self.model, self.lm_head = nn.Module(), model.lm_head if stage == stages - 1 else None
        kept = [str(i) for i in range(stage * layers, (stage + 1) * layers)]
        self.model.layers = nn.ModuleDict({i: model.model.layers[int(i)] for i in kept})
        self.model.embed_tokens = model.model.embed_tokens if stage == 0 else None
        self.model.norm = model.model.norm if stage == stages - 1 else None
        self.rotary = model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.model.embed_tokens is None else self.model.embed_tokens(x)
        rotation = self.rotary(x, torch.arange(x.size(1))[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rotation)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


def sum_norms(parameters: list[nn.Parameter], limit: float) -> float:
    """Clip by the norm over all stages, which torch.distributed.pipelining leaves to the user."""
    square = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().double()
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


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
