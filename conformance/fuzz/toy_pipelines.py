"""Pipelines of small modules that are not Llamas, and their training on one process without picotron."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron.collectives import all_reduce
from picotron.data_parallel.data_parallel import DataParallelBucket, DataParallelNaive
from picotron.optimizer import AdamW, update_weights
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import make_config, torch_adamw
from tests.support.training import CPU
from workbench.pipelines.engine import BatchList
from workbench.pipelines.executor import Executor
from workbench.pipelines.modules import Message, Pipeline
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.search import fastest_schedule
from workbench.schedules.simulate import Costs
from workbench.variants.zero1 import DataParallelZero1
from workbench.variants.zero3 import DataParallelZero3

D, V = 6, 11
TRAINING = make_config(training__max_grad_norm=0.5, training__weight_decay=0.1).training
STEPS = 3
WRAPPERS: dict[str, Any] = {
    "naive": DataParallelNaive,
    "bucket": DataParallelBucket,
    "zero1": DataParallelZero1,
    "zero3": DataParallelZero3,
}
ENGINES = [*SCHEDULES, "searched"]


def like(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Layer(nn.Module):
    """A stage of one tensor in and out; the last one returns the loss. `args` are positional arguments."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_last = nn.Linear(D, 3 * D), nn.Linear(3 * D, D, bias=False), is_last
        self.unused = nn.Linear(2, 2)

    def forward(self, *inputs: Tensor, x: Tensor, target: Tensor) -> Tensor:
        h, scale = (x, *inputs) if len(inputs) == 1 else inputs
        h = h + scale * self.down(torch.tanh(self.up(h)))
        return F.mse_loss(h, target) if self.is_last else h


class Loss(nn.Module):
    """A last stage without parameters."""

    def forward(self, h: Tensor, scale: Tensor, *, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(scale * h, target)


def layers(stages: int) -> list[nn.Module]:
    return [Layer(number == stages - 1) for number in range(stages)]


def layers_and_loss(stages: int) -> list[nn.Module]:
    return [*(Layer(is_last=False) for _ in range(stages - 1)), Loss()]


def received_by_layer(stage: int, batch: dict[str, Any]) -> Message:
    return like(*batch["x"].shape)


class Encoder(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D) if is_first else None
        self.layer = nn.Linear(D, D)

    def forward(self, h: Tensor | None = None, *_: Any, source: Tensor, target: Tensor) -> Message:
        h = h if self.embedding is None else self.embedding(source)
        assert h is not None
        h = torch.tanh(self.layer(h))
        mask = source != 0
        return (h, mask) if mask.any() else (h, ~mask)


class Decoder(nn.Module):
    """Its output and the encoder's travel together, with a mask that needs no gradient. The embedding is tied to the
    head of the last stage, whose bias is not.
    """

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D) if is_first else None
        self.query = nn.Linear(D, D)
        self.head = nn.Linear(D, V) if is_last else None

    def forward(self, h: Tensor, mask: Tensor, x: Tensor | None = None, *, source: Tensor, target: Tensor) -> Message:
        x = x if self.embedding is None else self.embedding(target)
        assert x is not None
        scores = (self.query(x) @ h.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
        x = x + scores.softmax(-1) @ h
        if self.head is None:
            return h, mask, x  # h and mask pass through
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def encoder_decoder(stages: int) -> list[nn.Module]:
    half = stages // 2
    found: list[nn.Module] = [Encoder(number == 0) for number in range(half)]
    found += [Decoder(number == half, number == stages - 1) for number in range(half, stages)]
    if stages > 1:
        found[-1].head.weight.data = found[half].embedding.weight.data.clone()
    return found


def received_by_half(stages: int) -> Callable[[int, dict[str, Any]], Message]:
    def receives(stage: int, batch: dict[str, Any]) -> Message:
        (B, S), (_, T) = batch["source"].shape, batch["target"].shape
        memory = like(B, S, D), like(B, S, dtype=torch.bool)
        return memory if stage <= stages // 2 else (*memory, like(B, T, D))

    return receives


KINDS: dict[str, Callable[[int], list[nn.Module]]] = {
    "layers": layers,
    "layers, loss": layers_and_loss,
    "encoder-decoder": encoder_decoder,
}


def data_of(kind: str, m: int, is_unequal: bool, step: int = 0) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(100 * step + m)
    found: list[dict[str, Any]] = []
    for i in range(m):
        B, S, T = (1 + i % 3, 5 - i % 4, 2 + i % 5) if is_unequal else (2, 5, 3)
        if kind != "encoder-decoder":
            x, target = (torch.randn(B, T, D, generator=draw, dtype=torch.float64) for _ in range(2))
            found.append({"args": (0.5 + i,), "x": x, "target": target})
        else:
            source, target = (torch.randint(V, (B, length), generator=draw) for length in (S, T))
            found.append({"source": source, "target": target})
    return found


def modules_of(kind: str, stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [each.double() for each in KINDS[kind](stages)]


def schedule_of(engine: str, pp: int, m: int) -> Schedule:
    if engine == "searched":
        return fastest_schedule(pp, m, 1.5, {(2, "V"): Costs(p2p=0.3)}).schedule
    return build(engine, pp, m)


def run_modules(modules: Sequence[nn.Module], batch: dict[str, Any]) -> Tensor:
    """Run all stages on one process, without anything of picotron."""
    args, batch = batch.get("args", ()), {name: value for name, value in batch.items() if name != "args"}
    message: Any = ()
    for module in modules:
        message = module(*(message if isinstance(message, tuple) else (message,)), *args, **batch)
    return message


def tied_places(kind: str, stages: int) -> list[list[tuple[int, str]]]:
    return [] if kind != "encoder-decoder" else [[(stages // 2, "embedding.weight"), (stages - 1, "head.weight")]]


def pipeline_of(kind: str, schedule: Schedule, frozen: tuple[int, ...] = ()) -> Pipeline:
    stages = schedule.num_stages
    receives = received_by_half(stages) if kind == "encoder-decoder" else received_by_layer
    modules = dict(enumerate(modules_of(kind, stages)))
    for number in frozen:
        modules[number].requires_grad_(False)
    return Pipeline(modules, receives, schedule, tied_places(kind, stages))


def train_pipeline(
    kind: str, engine: str, pp: int, m: int, dp_engine: str, frozen: tuple[int, ...] = (), is_unequal: bool = True
) -> dict[str, Any]:
    """Train this rank's stages for some steps, with clipping and weight decay.

    Returns:
        the losses and gradient norms of the steps, and the weights at the end by stage and name.
    """
    grid = setup_process_group_manager(1, 1, pp, dist.get_world_size() // pp)
    schedule = schedule_of(engine, pp, m)
    pipeline = pipeline_of(kind, schedule, frozen)
    model = WRAPPERS[dp_engine](pipeline)
    optimizer = AdamW(model, TRAINING, fused=False)
    executor = Executor(schedule)
    losses, norms = [], []
    for number in range(STEPS):
        batches = data_of(kind, m * grid.dp_world_size, is_unequal, number)[grid.dp_rank :: grid.dp_world_size]
        loss = executor(model, BatchList(batches), CPU).double()
        all_reduce(loss, grid.pp_group)
        all_reduce(loss, grid.dp_group, dist.ReduceOp.AVG)
        losses.append(loss)
        norms.append(update_weights(model, optimizer, TRAINING.max_grad_norm))
    for unit in getattr(model, "units", []):
        unit.gather()
    weights = {
        (int(number), name): parameter.detach().clone()
        for number, stage in pipeline.stages.items()
        for name, parameter in stage.named_parameters()
    }
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "weights": weights}


def train_modules(
    kind: str, stages: int, count: int, frozen: tuple[int, ...] = (), is_unequal: bool = True
) -> dict[str, Any]:
    """Train all stages on one process with torch's AdamW, on `count` micro-batches a step. See `train_pipeline`."""
    modules = modules_of(kind, stages)
    for (first, one), (second, other) in tied_places(kind, stages):
        modules[second].get_submodule(other.rpartition(".")[0]).weight = modules[first].get_parameter(one)
    for number in frozen:
        modules[number].requires_grad_(False)
    parameters = [p for p in nn.ModuleList(modules).parameters() if p.requires_grad]
    optimizer = torch_adamw(parameters, TRAINING)
    losses, norms = [], []
    for number in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # weight decay reaches unused parameters, too
        loss = torch.stack([run_modules(modules, each) for each in data_of(kind, count, is_unequal, number)]).mean()
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, TRAINING.max_grad_norm))
        optimizer.step()
    weights = {(n, name): p.detach() for n, module in enumerate(modules) for name, p in module.named_parameters()}
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "weights": weights}
