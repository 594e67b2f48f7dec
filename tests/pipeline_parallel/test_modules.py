"""Pipelines of modules that are not Llamas equal one process, in every schedule, and torch's own pipelines."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.console import UserError
from picotron.data.loader import BatchList
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.data_parallel.zero1 import DataParallelZero1
from picotron.data_parallel.zero3 import DataParallelZero3
from picotron.model.weights import main_grad
from picotron.optimizer import AdamW, update_weights
from picotron.pipeline_parallel import recorder
from picotron.pipeline_parallel.executor import Executor, StepState
from picotron.pipeline_parallel.modules import Message, Pipeline
from picotron.process_group_manager import setup_process_group_manager
from picotron.schedules.actions import Action, Schedule
from picotron.schedules.schedules import SCHEDULES, build, forward_only
from picotron.schedules.search import fastest_schedule
from picotron.schedules.simulate import Costs, Timeline
from picotron.schedules.trace import timeline_costs
from tests.support.nccl_calls import operations
from tests.support.nccl_order import Play
from tests.support.nccl_programs import recorded_rank
from tests.support.oracle import assert_close, make_config
from tests.support.training import CPU
from tests.support.worker_pool import WorkerPool

D, V = 6, 11
TRAINING = make_config(training__max_grad_norm=0.5, training__weight_decay=0.1).training
ENGINES = [*SCHEDULES, "searched"]


def like(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


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


def layers(stages: int) -> list[nn.Module]:
    return [Layer(number == stages - 1) for number in range(stages)]


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
        memory = like(B, S, D), like(B, S, dtype=torch.bool, requires_grad=False)
        return memory if stage <= stages // 2 else (*memory, like(B, T, D))

    return receives


def data_of(kind: str, m: int, is_unequal: bool) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(m)
    found: list[dict[str, Any]] = []
    for i in range(m):
        B, S, T = (1 + i % 3, 5 - i % 4, 2 + i % 5) if is_unequal else (2, 5, 3)
        if kind == "layers":
            x, target = (torch.randn(B, T, D, generator=draw, dtype=torch.float64) for _ in range(2))
            found.append({"args": (0.5 + i,), "x": x, "target": target})
        else:
            source, target = (torch.randint(V, (B, length), generator=draw) for length in (S, T))
            found.append({"source": source, "target": target})
    return found


def modules_of(kind: str, stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [each.double() for each in (layers if kind == "layers" else encoder_decoder)(stages)]


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
    return [] if kind == "layers" else [[(stages // 2, "embedding.weight"), (stages - 1, "head.weight")]]


def expected_gradients(kind: str, stages: int, batches: Sequence[dict[str, Any]]) -> tuple[Tensor, list[Any]]:
    """Return the loss of a step, and the gradients of each stage by the names of its parameters."""
    modules = modules_of(kind, stages)
    for (first, one), (second, other) in tied_places(kind, stages):
        modules[second].get_submodule(other.rpartition(".")[0]).weight = modules[first].get_parameter(one)
    loss = torch.stack([run_modules(modules, batch) for batch in batches]).mean()
    loss.backward()
    return loss.detach(), [{name: p.grad for name, p in module.named_parameters()} for module in modules]


def pipeline_of(kind: str, schedule: Schedule, frozen: tuple[int, ...] = ()) -> Pipeline:
    stages = schedule.num_stages
    receives = received_by_layer if kind == "layers" else received_by_half(stages)
    modules = dict(enumerate(modules_of(kind, stages)))
    for number in frozen:
        modules[number].requires_grad_(False)
    return Pipeline(modules, receives, schedule, tied_places(kind, stages))


def step(
    kind: str, engine: str, m: int, is_unequal: bool, pp: int = 2
) -> tuple[Tensor, Tensor, dict[tuple[int, str], Any]]:
    """Return the losses of a training step and of an evaluation, and the gradients of this rank's stages."""
    grid = setup_process_group_manager(1, 1, pp, dist.get_world_size() // pp)
    schedule = schedule_of(engine, pp, m) if engine != "recorded" else recorded_schedule(kind, m)
    pipeline = pipeline_of(kind, schedule)
    model: Any = DataParallelBucket(pipeline, parameters_by_stage=pipeline.parameters_by_stage())
    batches = data_of(kind, m * grid.dp_world_size, is_unequal)[grid.dp_rank :: grid.dp_world_size]
    loss = Executor(schedule)(model, BatchList(batches), CPU).double()
    evaluation = forward_only(schedule.pp, m, schedule.chunks, schedule.placement)
    evaluated = Executor(evaluation)(model, BatchList(batches), CPU).double()
    for each in (loss, evaluated):
        all_reduce(each, grid.pp_group)
        all_reduce(each, grid.dp_group, dist.ReduceOp.AVG)
    gradients = {
        (int(number), name): main_grad(parameter)
        for number, stage in pipeline.stages.items()
        for name, parameter in stage.named_parameters()
    }
    return loss, evaluated, gradients


def recorded_schedule(kind: str, m: int) -> Schedule:
    """Record the times of a step, and search the fastest schedule for them."""
    pipeline = pipeline_of(kind, build("zbv", 2, m))
    model: Any = DataParallelBucket(pipeline, parameters_by_stage=pipeline.parameters_by_stage())
    recorder.recorder = recorder.Recorder(CPU)
    Executor(pipeline.schedule)(model, BatchList(data_of(kind, m, True)), CPU)
    spans: list[Any] = [None, None]
    dist.all_gather_object(spans, recorder.recorder.spans)
    recorder.recorder = None
    _, costs = timeline_costs(Timeline(spans), "of this test")
    return fastest_schedule(2, m, 1.5, {(2, "V"): costs}).schedule


def check(results: Sequence[Any], kind: str, stages: int, batches: Sequence[dict[str, Any]]) -> None:
    loss, gradients = expected_gradients(kind, stages, batches)
    seen = set()
    for ours, evaluated, found in results:
        assert_close(ours, loss, what="loss")
        assert_close(evaluated, loss, what="evaluation")
        for (number, name), gradient in found.items():
            expected = gradients[number][name]
            assert_close(gradient, gradient * 0 if expected is None else expected, what=f"{number} {name}")
            seen.add(number)
    assert seen == set(range(stages))


@pytest.mark.processes
@pytest.mark.parametrize("is_unequal", [pytest.param(False, marks=pytest.mark.parity), True], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", [pytest.param("layers", marks=pytest.mark.parity), "encoder-decoder"])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_equal_one_process(pool: WorkerPool, engine: str, kind: str, is_unequal: bool) -> None:
    m = 5 if engine == "searched" else 6
    stages = schedule_of(engine, 2, m).num_stages
    check(pool.run(step, 2, kind, engine, m, is_unequal), kind, stages, data_of(kind, m, is_unequal))


@pytest.mark.processes
def test_schedules_for_recorded_times_equal_one_process(pool: WorkerPool) -> None:
    m, kind = 5, "encoder-decoder"
    check(pool.run(step, 2, kind, "recorded", m, True), kind, 4, data_of(kind, m, True))


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(20))
def test_drawn_pipelines_equal_one_process(pool: WorkerPool, seed: int) -> None:
    dice = random.Random(seed)
    engine, kind, is_unequal = dice.choice(ENGINES), dice.choice(("layers", "encoder-decoder")), dice.random() < 0.5
    pp, m = (dice.choice((2, 4)), dice.randint(1, 9))
    dp = dice.choice((1, 4 // pp))
    stages = schedule_of(engine, pp, m).num_stages
    results = pool.run(step, pp * dp, kind, engine, m, is_unequal, pp)
    check(results, kind, stages, data_of(kind, m * dp, is_unequal))


STEPS = 3


def trained(kind: str, engine: str, m: int, wrap: type[DataParallel], frozen: tuple[int, ...]) -> dict[Any, Tensor]:
    """Return the weights of this rank's stages after some steps with clipping and weight decay."""
    grid = setup_process_group_manager(1, 1, 2, dist.get_world_size() // 2)
    schedule = schedule_of(engine, 2, m)
    pipeline = pipeline_of(kind, schedule, frozen)
    model: Any
    if wrap is DataParallelZero3:
        model = wrap(pipeline, used_twice=pipeline.used_twice())
    else:
        model = wrap(pipeline, parameters_by_stage=pipeline.parameters_by_stage())
    optimizer = AdamW(model.parameters(), TRAINING, fused=False)
    executor = Executor(schedule)
    for number in range(STEPS):
        batches = data_of(kind, m * grid.dp_world_size + number, True)[grid.dp_rank :: grid.dp_world_size][:m]
        executor(model, BatchList(batches), CPU)
        update_weights(model, optimizer, TRAINING.max_grad_norm)
    for unit in getattr(model, "units", []):
        unit.gather()
    return {
        (int(number), name): parameter.detach().clone()
        for number, stage in pipeline.stages.items()
        for name, parameter in stage.named_parameters()
    }


def expected_training(kind: str, stages: int, count: int, frozen: tuple[int, ...]) -> dict[Any, Tensor]:
    modules = modules_of(kind, stages)
    for (first, one), (second, other) in tied_places(kind, stages):
        modules[second].get_submodule(other.rpartition(".")[0]).weight = modules[first].get_parameter(one)
    for number in frozen:
        modules[number].requires_grad_(False)
    parameters = [p for p in nn.ModuleList(modules).parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": TRAINING.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = TRAINING.adam_beta1, TRAINING.adam_beta2
    optimizer = torch.optim.AdamW(groups, lr=TRAINING.learning_rate, betas=betas, eps=TRAINING.adam_eps)
    for number in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # weight decay reaches unused parameters, too
        torch.stack(
            [run_modules(modules, each) for each in data_of(kind, count + number, True)[:count]]
        ).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, TRAINING.max_grad_norm)
        optimizer.step()
    return {(n, name): p.detach() for n, module in enumerate(modules) for name, p in module.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "engine", "wrap", "ranks", "frozen"),
    [
        ("layers", "1f1b", DataParallelBucket, 2, (0,)),
        ("encoder-decoder", "zbv", DataParallelBucket, 2, ()),
        ("encoder-decoder", "1f1b", DataParallelZero1, 4, ()),
        ("encoder-decoder", "zbv", DataParallelZero3, 4, ()),
        pytest.param("encoder-decoder", "interleaved_1f1b", DataParallelZero3, 4, (1,), marks=pytest.mark.parity),
        pytest.param("encoder-decoder", "interleaved_1f1b", DataParallelZero1, 4, (0, 1), marks=pytest.mark.parity),
        pytest.param("layers", "zb_h1", DataParallelBucket, 4, (1,), marks=pytest.mark.parity),
    ],
)
def test_trained_weights_equal_one_process(
    pool: WorkerPool, kind: str, engine: str, wrap: type[DataParallel], ranks: int, frozen: tuple[int, ...]
) -> None:
    m = 4
    stages = schedule_of(engine, 2, m).num_stages
    expected = expected_training(kind, stages, m * ranks // 2, frozen)
    for found in pool.run(trained, ranks, kind, engine, m, wrap, frozen):
        for key, weight in found.items():
            assert_close(weight, expected[key], what=str(key))


class ForTorch(nn.Module):
    """A layer with the interface of torch's pipelines: one tensor in, one tensor out, and the loss elsewhere."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, layer.is_last = layer, False

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h, torch.tensor(0.5), x=h, target=h)


def torch_gradients(engine: str, m: int) -> dict[str, Any]:
    grid = setup_process_group_manager(1, 1, 2, 1)
    batches = data_of("layers", m, False)
    layer: Any = modules_of("layers", 2)[grid.pp_rank]
    stage = PipelineStage(ForTorch(layer), grid.pp_rank, 2, CPU, group=grid.pp_group)
    schedule = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[engine](stage, m, loss_fn=F.mse_loss)
    x, target = (torch.cat([batch[name] for batch in batches]) for name in ("x", "target"))
    if grid.pp_rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    ours = pipeline_of("layers", build(engine, 2, m))
    model: Any = DataParallelBucket(ours, parameters_by_stage=ours.parameters_by_stage())
    Executor(ours.schedule)(model, BatchList([batch | {"args": (0.5,)} for batch in batches]), CPU)
    pairs = zip(layer.named_parameters(), ours.stages[str(grid.pp_rank)].parameters(), strict=True)
    return {name: (main_grad(own), theirs.grad) for (name, theirs), own in pairs if theirs.grad is not None}


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["afab", "1f1b"])
def test_gradients_equal_those_of_torch(pool: WorkerPool, engine: str) -> None:
    for found in pool.run(torch_gradients, 2, engine, 4):
        assert len(found) == 3
        for name, (ours, theirs) in found.items():
            assert_close(ours, theirs, what=name)


def mistake(kind: str) -> str:
    grid = setup_process_group_manager(1, 1, 2, 1)
    schedule, modules = build("1f1b", 2, 2), dict(enumerate(modules_of("encoder-decoder", 2)))
    if kind == "missing":
        del modules[1]
    receives: Any = received_by_half(2)
    if kind == "number":

        def receives(stage: int, batch: dict[str, Any]) -> Message:
            return like(2, 5, D)

    elif kind == "shape":

        def receives(stage: int, batch: dict[str, Any]) -> Message:
            return received_by_half(2)(stage, batch | {"source": batch["source"][:, 1:]})

    try:
        pipeline = Pipeline(modules, receives, schedule)
        if grid.pp_rank == 0 and kind != "missing":
            batches = data_of("encoder-decoder", 2, False)
            StepState(schedule, DataParallelBucket(pipeline), batches, CPU).forward(Action("F", 0, 0))
    except (UserError, ValueError) as error:
        return str(error)
    return ""


def test_mistakes_are_one_sentence(pool: WorkerPool) -> None:
    assert pool.run(mistake, 2, "missing")[1] == "pp rank 1 runs stage 1, but `stages` lacks it; add its module"
    assert "the receiver expects torch.float64 [2, 4, 6] on cpu" in pool.run(mistake, 2, "shape")[0]
    assert pool.run(mistake, 2, "number")[0] == "stage 0 returned 2 tensors, but stage 1 receives 1"


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_several_tensors_finish_on_nccl(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one operation, and no rank waits forever, even if a GPU runs one operation at a time."""
    monkeypatch.setattr(pgm, "process_group_manager", None)
    m, programs = 5 if engine == "searched" else 6, []
    for rank in range(4):
        with recorded_rank(rank, make_config(distributed__pp_size=2, distributed__dp_size=2)) as program:
            pipeline = pipeline_of("encoder-decoder", schedule_of(engine, 2, m))
            model: Any = DataParallelBucket(pipeline, parameters_by_stage=pipeline.parameters_by_stage())
            Executor(pipeline.schedule)(model, BatchList(data_of("encoder-decoder", m, True)), CPU)
        programs.append(program)
    for one_at_a_time in (False, True):
        Play(programs, one_at_a_time=one_at_a_time).run()
    sent = [operation for operation in operations(programs[0]) if operation.is_batch]
    assert {len(operation.parts) for operation in sent} <= {1, 2, 3}
    masks = [part.tensor for operation in sent for part in operation.parts if "bool" in part.tensor]
    assert len(masks) >= m  # forward only: no gradients of masks
