"""Order of the actions in the pipeline loops, which run with recorders in place of their primitives."""

import itertools
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.pipeline_parallel import pipeline_parallel
from picotron.pipeline_parallel.pipeline_parallel import train_step, train_step_pipeline_1f1b, train_step_pipeline_afab
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import CPU, Loader, batches, stage_of
from workbench.schedules.schedules import build

STEPS = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}
GRID = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(1, 10)]
SHORT = {"recv_forward": "rF", "send_forward": "sF", "recv_backward": "rB", "send_backward": "sB"}
SHORT |= {"send_fwd_recv_bwd": "sF|rB", "send_bwd_recv_fwd": "sB|rF"}


def trace(engine: str, stage: int, stages: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the events of a stage: F0, B0 (B0* reduces gradients), sends, receives, and a send with a receive (|)."""
    events: list[str] = []
    grid = SimpleNamespace(pp_rank=stage, pp_world_size=stages, pp_is_last_stage=stage == stages - 1)
    toward_next = {"sF", "rB", "sF|rB"}

    def communicate(operation: str, *_: Any, **__: Any) -> None:
        name = SHORT[operation]
        if stage < stages - 1 if name in toward_next else stage > 0:
            events.append(name)

    def backward(x: Any, y: int, dy: Any) -> None:
        events.append(f"B{y}" + "*" * model.require_backward_grad_sync)

    def forward(model: Any, loader: Any, x: Any, losses: Any) -> int:
        events.append(f"F{next(numbers)}")
        return int(events[-1][1:])

    numbers = itertools.count()
    kept: list[int] = []

    def graph_of(y: int) -> int:
        assert events[-1] in ("sF", "sF|rB") or stage == stages - 1, "an output is freed before it has been sent"
        kept.append(y)
        return y

    model = SimpleNamespace(require_backward_grad_sync=True, backward=backward)
    monkeypatch.setattr(pgm, "process_group_manager", grid)
    monkeypatch.setattr(pipeline_parallel, "pipeline_communicate", communicate)
    monkeypatch.setattr(pipeline_parallel, "bidirectional_pipeline_communicate", communicate)
    monkeypatch.setattr(pipeline_parallel, "forward_step", forward)
    monkeypatch.setattr(pipeline_parallel, "graph_of", graph_of)
    STEPS[engine](model, SimpleNamespace(grad_acc_steps=micro_batches), (1,), CPU, torch.float32)
    assert kept == list(range(micro_batches))
    return events


@pytest.mark.parametrize(
    ("engine", "micro_batches", "expected"),
    [
        ("afab", 2, ["F0 sF F1 sF rB B0 rB B1*", "rF F0 sF rF F1 sF rB B0 sB rB B1* sB", "rF F0 rF F1 B0 sB B1* sB"]),
        ("1f1b", 1, ["F0 sF rB B0*", "rF F0 sF rB B0* sB", "rF F0 sF rB B0* sB", "rF F0 B0* sB"]),
        (
            "1f1b",
            4,
            [
                "F0 sF F1 sF F2 sF|rB B0 F3 sF|rB B1 rB B2 rB B3*",
                "rF F0 sF rF F1 sF|rB B0 sB|rF F2 sF|rB B1 sB|rF F3 sF|rB B2 sB rB B3* sB",
                "rF F0 B0 sB|rF F1 B1 sB|rF F2 B2 sB|rF F3 B3* sB",
            ],
        ),
    ],
)
def test_loops_run_in_the_expected_order(
    engine: str, micro_batches: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = len(expected)
    assert [" ".join(trace(engine, rank, stages, micro_batches, monkeypatch)) for rank in range(stages)] == expected


@pytest.mark.parametrize("engine", STEPS)
def test_loops_run_the_programs_of_the_schedules(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pp, micro_batches in GRID:
        for rank, program in enumerate(build(engine, pp, micro_batches).programs):
            events = [e for e in trace(engine, rank, pp, micro_batches, monkeypatch) if e[0] in "FB"]
            assert [f"{rank}{e.rstrip('*')}" for e in events] == list(map(str, program))


# ----------------------------------------------------------------------------------------------------------- real steps


def test_a_step_frees_the_graph_of_a_micro_batch_before_the_next_forward() -> None:
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    def model(**batch: Any) -> Tensor:
        counts.append(len(graphs))
        loss = torch.ones((), requires_grad=True) * 1.0
        graphs.add(hook := lambda _: None)
        loss.register_hook(hook)  # the graph has the only reference
        return loss

    train_step(model, Loader(batches(3)), CPU)  # type: ignore[arg-type]
    assert counts == [0, 0, 0]


def live_outputs(engine: str, micro_batches: int) -> list[int]:
    """Return the number of outputs of this stage that are in memory before each forward of one step."""
    model = DataParallelBucket(stage_of(make_config("pp4"), tiny_llama(num_hidden_layers=4)))
    outputs: list[Any] = []  # weak references to their storages
    live, original = [], pipeline_parallel.forward_step

    def forward_step(*arguments: Any) -> Tensor:
        live.append(sum(storage() is not None for storage in outputs))
        y = original(*arguments)
        outputs.append(weakref.ref(y.untyped_storage()))
        return y

    with mock.patch.object(pipeline_parallel, "forward_step", forward_step):
        STEPS[engine](model, Loader(batches(micro_batches)), (2, 16, 32), CPU, torch.float64)
    return live


@pytest.mark.parametrize("engine", STEPS)
def test_sent_outputs_are_freed(pool: WorkerPool, engine: str) -> None:
    """How many activations are saved shows in the bytes that test_memory counts."""
    assert pool.run(live_outputs, 4, engine, 6)[:3] == [[0] * 6] * 3
