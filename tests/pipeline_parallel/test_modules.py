"""Pipelines of modules that are not Llamas equal one process, in every schedule, and torch's own pipelines."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from conformance.fuzz.toy_pipelines import (
    ENGINES,
    D,
    Layer,
    data_of,
    expected_gradients,
    like,
    modules_of,
    pipeline_of,
    received_by_half,
    schedule_of,
    train_modules,
    train_pipeline,
)
from conformance.oracle import assert_close, make_config
from conformance.training import CPU
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.console import UserError
from picotron.data.loader import BatchList
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.split_backward import defer_weight_grads, run_deferred, split_backward
from picotron.model.weights import main_grad
from picotron.pipeline_parallel import recorder
from picotron.pipeline_parallel.executor import Executor, StepState
from picotron.pipeline_parallel.modules import Message, Pipeline
from picotron.process_group_manager import setup_process_group_manager
from picotron.schedules.actions import Action, Schedule, parse_action
from picotron.schedules.schedules import build, forward_only
from picotron.schedules.search import fastest_schedule
from picotron.schedules.simulate import Timeline
from picotron.schedules.trace import timeline_costs
from tests.support.nccl_calls import operations
from tests.support.nccl_order import Play
from tests.support.nccl_programs import recorded_rank


def step(
    kind: str, engine: str, m: int, is_unequal: bool, pp: int = 2
) -> tuple[Tensor, Tensor, dict[tuple[int, str], Any]]:
    """Return the losses of a training step and of an evaluation, and the gradients of this rank's stages."""
    grid = setup_process_group_manager(1, 1, pp, dist.get_world_size() // pp)
    schedule = schedule_of(engine, pp, m) if engine != "recorded" else recorded_schedule(kind, m)
    pipeline = pipeline_of(kind, schedule)
    model: Any = DataParallelBucket(pipeline)
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
    model: Any = DataParallelBucket(pipeline)
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
@pytest.mark.parametrize("is_unequal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", [pytest.param("layers", marks=pytest.mark.slow), "encoder-decoder"])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_equal_one_process(pool: WorkerPool, engine: str, kind: str, is_unequal: bool) -> None:
    m = 5 if engine == "searched" else 6
    stages = schedule_of(engine, 2, m).num_stages
    check(pool.run(step, 2, kind, engine, m, is_unequal), kind, stages, data_of(kind, m, is_unequal))


@pytest.mark.processes
def test_schedules_for_recorded_times_equal_one_process(pool: WorkerPool) -> None:
    m, kind = 5, "encoder-decoder"
    check(pool.run(step, 2, kind, "recorded", m, True), kind, 4, data_of(kind, m, True))


@pytest.mark.processes
class Square(nn.Module):
    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(D, D, bias=False, dtype=torch.float64), is_last
        self.linear.weight.data = torch.arange(1.0, D * D + 1, dtype=torch.float64).view(D, D) / D**3

    def forward(self, *inputs: Tensor, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(*inputs or (x,)))
        return y.square().mean() if self.is_last else y


def rows_of(rank: int) -> Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def tied_linear(order: str) -> Tensor:
    """Return the gradient of a matrix that two stages of a rank use, for an order of the actions."""
    grid = setup_process_group_manager(1, 1, 1, 2)
    schedule = Schedule([[parse_action(action) for action in order.split(",")]], 1, 2, "loop")
    places = [[(0, "linear.weight"), (1, "linear.weight")]]
    pipeline = Pipeline({0: Square(False), 1: Square(True)}, lambda stage, batch: like(3, D), schedule, places)
    model: Any = DataParallelBucket(pipeline)  # which knows the parameters of each stage
    Executor(schedule)(model, BatchList([{"x": rows_of(grid.dp_rank)}]), CPU)
    return main_grad(next(pipeline.parameters()))


@pytest.mark.parametrize("order", ["0F0,1F0,1I0,1W0,0I0,0W0", "0F0,1F0,1I0,0I0,0W0,1W0"])
def test_a_matrix_of_two_stages_is_reduced_after_the_last_of_their_backwards(pool: WorkerPool, order: str) -> None:
    matrix = Square(True).linear.weight.detach().requires_grad_()
    losses = [torch.tanh(torch.tanh(rows_of(rank) @ matrix.T) @ matrix.T).square().mean() for rank in range(2)]
    torch.stack(losses).mean().backward()
    for gradient in pool.run(tied_linear, 2, order):
        assert_close(gradient, matrix.grad)


@pytest.mark.parametrize(
    ("kind", "engine", "dp_engine", "ranks", "frozen"),
    [
        ("layers", "1f1b", "bucket", 2, (0,)),
        ("encoder-decoder", "zbv", "bucket", 2, ()),
        ("encoder-decoder", "1f1b", "zero1", 4, ()),
        ("encoder-decoder", "zbv", "zero3", 4, ()),
        pytest.param("encoder-decoder", "interleaved_1f1b", "zero3", 4, (1,), marks=pytest.mark.slow),
        pytest.param("encoder-decoder", "interleaved_1f1b", "zero1", 4, (0, 1), marks=pytest.mark.slow),
        pytest.param("layers", "zb_h1", "bucket", 4, (1,), marks=pytest.mark.slow),
    ],
)
def test_trained_weights_equal_one_process(
    pool: WorkerPool, kind: str, engine: str, dp_engine: str, ranks: int, frozen: tuple[int, ...]
) -> None:
    m = 4
    expected = train_modules(kind, schedule_of(engine, 2, m).num_stages, m * ranks // 2, frozen)
    for found in pool.run(train_pipeline, ranks, kind, engine, 2, m, dp_engine, frozen):
        for key, weight in found["weights"].items():
            assert_close(weight, expected["weights"][key], what=str(key))
        for key in ("losses", "norms"):
            assert_close(found[key], expected[key], what=key)


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
    model: Any = DataParallelBucket(ours)
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
    assert pool.run(mistake, 2, "number")[0] == (
        "stage 0 returned 2 tensors, but stage 1 receives 1; make `receives` describe what the stage returns"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_several_tensors_finish_on_nccl(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one operation, and no rank waits forever, even if a GPU runs one operation at a time."""
    monkeypatch.setattr(pgm, "process_group_manager", None)
    m, programs = 5 if engine == "searched" else 6, []
    for rank in range(4):
        with recorded_rank(rank, make_config(distributed__pp_size=2, distributed__dp_size=2)) as program:
            pipeline = pipeline_of("encoder-decoder", schedule_of(engine, 2, m))
            model: Any = DataParallelBucket(pipeline)
            Executor(pipeline.schedule)(model, BatchList(data_of("encoder-decoder", m, True)), CPU)
        programs.append(program)
    for one_at_a_time in (False, True):
        Play(programs, one_at_a_time=one_at_a_time).run()
    sent = [operation for operation in operations(programs[0]) if operation.is_batch]
    assert {len(operation.parts) for operation in sent} <= {1, 2, 3}
    masks = [part.tensor for operation in sent for part in operation.parts if "bool" in part.tensor]
    assert len(masks) >= m  # forward only: no gradients of masks


def test_split_linears_follow_autocast() -> None:
    torch.manual_seed(0)
    gradients = []
    for splits in (False, True):
        model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        model.load_state_dict(
            {name: torch.arange(p.numel()).view(p.shape) / 99 for name, p in model.named_parameters()}
        )
        if splits:
            split_backward(model)
        with torch.autocast("cpu", torch.bfloat16), defer_weight_grads() as deferred:
            output = model(torch.arange(3.0 * D).view(3, D))
            output.sum().backward()
        run_deferred(deferred)
        gradients.append([p.grad for p in model.parameters()])
    for plain, split in zip(*gradients, strict=True):
        assert split.dtype == plain.dtype == torch.float32
        assert torch.equal(split, plain)
