"""Pipelines of modules that are not Llamas: messages of several tensors, mistakes, and split linear layers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.llama import Linear
from picotron.process_group_manager import setup_process_group_manager
from tests.fuzz.pipelines import D, data_of, modules_of, pipeline_of, received
from tests.support.nccl_programs import recorded_rank
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import CPU, stage_of
from tests.workbench.pipelines.test_nccl_order import assert_finishes
from workbench.pipelines.engine import BatchList
from workbench.pipelines.executor import Executor, StepState
from workbench.pipelines.modules import Message, Pipeline
from workbench.pipelines.split_backward import defer_weight_grads, run_deferred, split_backward
from workbench.schedules.actions import Action
from workbench.schedules.nccl_calls import operations
from workbench.schedules.schedules import build


def mistake(kind: str) -> str:
    if setup_process_group_manager(1, 1, 2, 1).pp_rank == 1:
        return ""
    schedule, modules = build("1f1b", 2, 2), dict(enumerate(modules_of(2)))
    if kind == "missing":
        del modules[0]

    def receives(stage: int, batch: dict[str, Any]) -> Message:
        return received(2)(stage, batch | {"source": batch["source"][:, 1:]})

    try:
        pipeline = Pipeline(modules, receives, schedule)
        StepState(schedule, DataParallelBucket(pipeline), data_of(2), CPU).forward(Action("F", 0, 0))
    except (UserError, ValueError) as error:
        return str(error)
    return ""


def test_mistakes_are_one_sentence(pool: WorkerPool) -> None:
    assert pool.run(mistake, 2, "missing")[0] == "pp rank 0 runs stage 0, but `stages` lacks it; add its module"
    assert "the receiver expects torch.float64 [1, 4, 6] on cpu" in pool.run(mistake, 2, "shape")[0]


@pytest.mark.parametrize("engine", ["1f1b", "zbv"])
def test_messages_of_several_tensors_finish_on_nccl(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one operation, and no rank waits forever, even if a GPU runs one operation at a time."""
    monkeypatch.setattr(pgm, "process_group_manager", None)
    m, programs = 6, []
    for rank in range(4):
        with recorded_rank(rank, make_config("pp2 dp2")) as program:
            pipeline = pipeline_of(build(engine, 2, m), [])
            model = DataParallelBucket(pipeline)
            Executor(pipeline.schedule)(model, BatchList(data_of(m)), CPU)
        programs.append(program)
    assert_finishes(programs)
    sent = [operation for operation in operations(programs[0]) if operation.is_batch]
    assert {len(operation.parts) for operation in sent} <= {1, 2, 3}
    masks = [part.tensor for operation in sent for part in operation.parts if "bool" in part.tensor]
    assert len(masks) >= m  # forward only: no gradients of masks


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("key", [{"training__compile": True}, {"training__activation_checkpointing": "selective"}])
def test_a_copy_of_a_stage_computes_with_its_own_weights(key: dict[str, Any]) -> None:
    """It has the forwards that a program has set, and the modules that it shares."""
    stage = stage_of(make_config(**key), tiny_llama())
    model = stage.module.model
    unused, used = (model.layers[i].mlp for i in "01")
    unused.forward = used.forward
    stage.compile(backend="eager")
    for lost in (unused, stage):
        copied = copy.deepcopy(stage, {id(model.norm): model.norm})
        for parameter in {*lost.parameters()} - {model.norm.weight}:
            parameter.data.fill_(torch.nan)
    positions = torch.arange(6).expand(2, -1)
    assert copied(positions, positions).isfinite().all()


def assert_split_as_plain(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], after: Callable[[], Any] = lambda: None
) -> None:
    """Compare the gradients of split linears with those of plain ones; `after` is called between I and W."""
    gradients = []
    for prepare in (nn.Module.train, split_backward):
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        prepare(model)
        loss = loss_of(model)
        with defer_weight_grads() as deferred:
            loss.backward()
        after()
        run_deferred(deferred)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", [nn.Linear, Linear])
@pytest.mark.parametrize("parametrized", [False, True])
def test_split_linears_follow_autocast_and_parametrizations(kind: type[nn.Linear], parametrized: bool) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        if parametrized:
            parametrize.register_parametrization(model[2], "weight", nn.Tanh())
        return model(torch.arange(3.0 * D).view(3, D)).sum()

    with torch.autocast("cpu", torch.bfloat16):
        assert_split_as_plain(lambda: nn.Sequential(kind(D, D), nn.Tanh(), kind(D, D)), loss_of)


def test_split_linears_are_complex_in_transforms_and_of_buffers() -> None:
    """The next forward changes the buffer before W."""
    x = torch.zeros(D, dtype=torch.cfloat)

    def loss_of(model: nn.Module) -> Tensor:
        return torch.vmap(model[2])(model[:2](x.fill_(1))[None]).abs().sum()

    assert_split_as_plain(lambda: nn.Sequential(*[nn.Linear(D, D, dtype=x.dtype) for _ in "012"]), loss_of, x.zero_)


def test_split_linears_have_gradients_of_gradients_in_a_checkpoint() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        return torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)[0].square().sum()

    assert_split_as_plain(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1)),
        lambda model: checkpoint(penalty, model, torch.ones(2, D, requires_grad=True), use_reentrant=False),
    )
