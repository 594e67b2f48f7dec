"""The public alternative to picotron's pipelines: torch.distributed.pipelining, on the same stages."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

from benchmarks.torch_schedules import CLASSES
from benchmarks.workload import (
    MICRO_BATCH,
    ON_GPU,
    SEQ_LENGTH,
    device_of,
    loader_of,
    model_config,
    parts_of,
    run_config,
    torch_adamw,
)
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.model.cross_entropy import LinearCrossEntropy, linear_cross_entropy
from workbench.pipelines.modules import LlamaStages
from workbench.pipelines.planning import training_schedule
from workbench.variants.choose import build_stage

PP = 2
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # of what picotron's stages send, and of its head
MODEL = model_config(tied=False)  # torch's stages do not sum the gradients of tied embeddings
TORCH_CLASSES: dict[str, Any] = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B} | CLASSES  # zb_h1: one stage per rank


def config_of(engine: str, micro_batches: int) -> Config:
    return run_config({"pp_size": PP, "pp_engine": engine}, gradient_accumulation_steps=micro_batches)


class TorchStage(nn.Module):
    """A stage of picotron with the interface of torch's schedules: one tensor in, one tensor out; the last stage
    returns the loss.

    On a GPU its weights are float32, like picotron's master weights, and it computes under bfloat16 autocast.
    """

    def __init__(self, held: LlamaStages, number: int) -> None:
        super().__init__()
        self.stage, llama = held.stages[number], held.module
        self.layers = nn.ModuleList(llama.model.layers[str(i)] for i in self.stage.layers)
        self.embedding = llama.model.embed_tokens if self.stage.has_embedding else None
        self.norm, self.head = (llama.model.norm, llama.lm_head) if self.stage.has_head else (None, None)
        self.llama = [llama]  # in a list, so that it is not a submodule: a rank can have several stages
        self.register_buffer("positions", torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1))

    def forward(self, x: Tensor, targets: Any = None) -> Tensor:
        (llama,) = self.llama
        with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
            y = llama.run_layers(
                llama.embed(x) if self.embedding else x, self.positions, self.layers, llama.attention_fn
            )
            if self.head is None:
                return y.to(DTYPE)
            # Of the loss's products, autocast would cast the operands, but not the tensors that hold the results.
            return llama.logits_or_loss(
                y,
                loss_fn=lambda head, x: linear_cross_entropy(
                    x.to(DTYPE), head.weight.to(DTYPE), targets, head.vocabulary
                ),
            )


def repeatable_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the backward of the loss without changing its gradients in place, because torch's split backward runs it
    twice: once for the gradients of inputs, once for those of weights.
    """
    dx, dweight = ctx.gradients
    return dx * gradient, (dweight * gradient).to(ctx.dtype), *[None] * 5


def torch_step(rank: int, engine: str, micro_batches: int) -> Callable[[], Any]:
    """Return a step of torch's schedule, on the same stages as picotron's."""
    device, config = device_of(rank), config_of(engine, micro_batches)
    ours = training_schedule(config)
    if ours.splits_backward:
        mock.patch.object(LinearCrossEntropy, "backward", staticmethod(repeatable_backward)).start()
    # without data parallelism, because torch reads `grad` instead of `main_grad`
    held = build_stage(*parts_of(config, device, torch.float32, MODEL))
    for module in held.modules():  # torch splits the backward of any graph and does not need picotron's `split_linear`
        if hasattr(module, "product"):
            module.product = F.linear
    modules = [TorchStage(held, number).to(device) for number in held.stages]
    group, count = pgm.process_group_manager.pp_group, ours.num_stages
    stages: list[Any] = [
        PipelineStage(module, number, count, device, group=group)
        for module, number in zip(modules, held.stages, strict=True)
    ]
    kind = TORCH_CLASSES[engine]
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, micro_batches, loss_fn=lambda loss, _: loss)
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    optimizer = torch_adamw(parameters)
    loader = loader_of(config, device)
    has_first, has_last = 0 in held.stages, count - 1 in held.stages

    def step() -> Tensor | None:
        batches = [next(loader) for _ in range(micro_batches)]
        ids, targets = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "target_ids"))
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": targets, "targets": targets, "losses": losses} if has_last else {}
        schedule.step(*([ids] if has_first else []), **last, return_outputs=False)
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square)
        torch._foreach_mul_(gradients, (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if has_last else None

    return step
