"""Random pipelines of modules that are not Llamas, against plain autograd and torch's AdamW on one process.

Several tensors travel between an encoder and a decoder, one of them without a gradient, in micro-batches of different
shapes; a matrix is at two places, and some weights are not used.
"""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.data_parallel.data_parallel import DataParallelBucket, DataParallelNaive
from picotron.optimizer import AdamW, update_weights
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import make_config, torch_adamw
from tests.support.training import CPU
from workbench.pipelines.engine import BatchList
from workbench.pipelines.executor import Executor
from workbench.pipelines.modules import Message, Pipeline
from workbench.run.metrics import global_mean
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import SCHEDULES, build
from workbench.variants.zero1 import DataParallelZero1
from workbench.variants.zero3 import DataParallelZero3

Case = dict[str, Any]
D, V = 6, 11
TRAINING = make_config(training__max_grad_norm=0.5, training__weight_decay=0.1).training
STEPS = 3
WRAPPERS: dict[str, Any] = {
    "naive": DataParallelNaive,
    "bucket": DataParallelBucket,
    "zero1": DataParallelZero1,
    "zero3": DataParallelZero3,
}


class Encoder(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D) if is_first else None
        self.layer, self.unused = nn.Linear(D, D), nn.Linear(2, 2)

    def forward(self, h: Tensor | None = None, *_: Any, source: Tensor, target: Tensor) -> Message:
        h = h if self.embedding is None else self.embedding(source)
        assert h is not None
        h = torch.tanh(self.layer(h))
        mask = source != 0
        return (h, mask) if mask.any() else (h, ~mask)


def doubled(linear: nn.Linear, x: Tensor) -> Tensor:
    return 2 * F.linear(x, linear.weight, linear.bias)


class Decoder(nn.Module):
    """Its output and the encoder's travel together, with a mask that needs no gradient. The embedding is tied to the
    head of the last stage, whose bias is not.
    """

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D) if is_first else None
        self.query = nn.Linear(D, D)
        self.query.forward = functools.partial(doubled, self.query)  # type: ignore[method-assign]  # as a library does
        self.head = nn.Linear(D, V) if is_last else None

    def forward(self, h: Tensor, mask: Tensor, x: Tensor | None = None, *, source: Tensor, target: Tensor) -> Message:
        x = x if self.embedding is None else self.embedding(target)
        assert x is not None
        scores = (self.query(x) @ h.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
        x = x + scores.softmax(-1) @ h
        if self.head is None:
            return h, mask, x  # h and mask pass through
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def modules_of(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    half = stages // 2
    found: list[nn.Module] = [Encoder(number == 0) for number in range(half)]
    found += [Decoder(number == half, number == stages - 1) for number in range(half, stages)]
    found[-1].head.weight.data = found[half].embedding.weight.data.clone()
    return [each.double() for each in found]


def received(stages: int) -> Callable[[int, dict[str, Any]], Message]:
    def receives(stage: int, batch: dict[str, Any]) -> Message:
        (B, S), (_, T) = batch["source"].shape, batch["target"].shape
        h = torch.empty(B, S, D, dtype=torch.float64, device="meta")
        memory = h, torch.empty(B, S, dtype=torch.bool, device="meta")
        return memory if stage <= stages // 2 else (*memory, h.new_empty(B, T, D))

    return receives


def data_of(m: int, step: int = 0) -> list[dict[str, Any]]:
    """Return micro-batches of different sizes and lengths."""
    draw = torch.Generator().manual_seed(100 * step + m)
    found: list[dict[str, Any]] = []
    for i in range(m):
        B, S, T = 1 + i % 3, 5 - i % 4, 2 + i % 5
        source, target = (torch.randint(V, (B, length), generator=draw) for length in (S, T))
        found.append({"source": source, "target": target})
    return found


def tied_places(stages: int) -> list[tuple[int, str]]:
    return [(stages // 2, "embedding.weight"), (stages - 1, "head.weight")]


def pipeline_of(schedule: Schedule, frozen: list[int]) -> Pipeline:
    stages = schedule.num_stages
    modules = dict(enumerate(modules_of(stages)))
    for number in frozen:
        modules[number % stages].requires_grad_(False)
    return Pipeline(modules, received(stages), schedule, [tied_places(stages)])


def train_stages(case: Case) -> dict[str, Any]:
    """Train this rank's stages for some steps, with clipping and weight decay.

    Returns:
        the losses and gradient norms of the steps, and the weights of all stages at the end, by stage and name.
    """
    modules = case["modules"]
    grid = setup_process_group_manager(1, 1, modules["pp"], modules["dp"])
    schedule = build(modules["engine"], modules["pp"], modules["m"])
    pipeline = pipeline_of(schedule, modules["frozen"])
    if modules.get("copied"):
        pipeline = copy.deepcopy(pipeline)
    model = WRAPPERS[modules["dp_engine"]](pipeline)
    optimizer = AdamW(model, TRAINING, fused=False)
    executor = Executor(schedule)
    losses, norms = [], []
    for step in range(STEPS):
        batches = data_of(modules["m"] * modules["dp"], step)[grid.dp_rank :: grid.dp_world_size]
        losses.append(global_mean(executor(model, BatchList(batches), CPU)).item())
        norms.append(update_weights(model, optimizer, TRAINING.max_grad_norm).item())
    for unit in getattr(model, "units", []):
        unit.gather()
    mine = {(int(n), name): p.detach() for n, stage in pipeline.stages.items() for name, p in stage.named_parameters()}
    stages: list[Any] = [None] * modules["pp"]
    dist.all_gather_object(stages, mine, group=pgm.process_group_manager.pp_group)
    return {"losses": losses, "norms": norms, "weights": {key: p for each in stages for key, p in each.items()}}


def expected(case: Case) -> dict[str, Any]:
    """Train all stages on one process, without anything of picotron."""
    case = case["modules"]
    stages = build(case["engine"], case["pp"], case["m"]).num_stages
    modules = modules_of(stages)
    (first, one), (second, _) = tied_places(stages)
    modules[second].head.weight = modules[first].get_parameter(one)
    for number in case["frozen"]:
        modules[number % stages].requires_grad_(False)
    parameters = [p for p in nn.ModuleList(modules).parameters() if p.requires_grad]
    optimizer = torch_adamw(parameters, TRAINING)
    losses, norms = [], []
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # weight decay reaches unused parameters, too
        each: list[Tensor] = []
        for batch in data_of(case["m"] * case["dp"], step):
            message: Any = ()
            for module in modules:
                message = module(*message, **batch)
            each.append(message)
        loss = torch.stack(each).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, TRAINING.max_grad_norm).item())
        optimizer.step()
    weights = {(n, name): p.detach() for n, module in enumerate(modules) for name, p in module.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def draw_modules(dice: random.Random) -> Case:
    """Draw a pipeline of at most 4 ranks."""
    pp, m, engine = dice.choice((2, 2, 4)), dice.randint(1, 9), dice.choice(list(SCHEDULES))
    stages = build(engine, pp, m).num_stages
    frozen = sorted(dice.sample(range(stages), dice.randint(0, stages - 1))) if dice.random() < 0.3 else []
    dp, dp_engine = dice.choice((1, 4 // pp)), dice.choice(list(WRAPPERS))
    case = {"engine": engine, "pp": pp, "dp": dp, "m": m, "dp_engine": dp_engine, "frozen": frozen}
    return case | {"copied": dice.random() < 0.2}
