"""The pipeline loops: what they free, and which backward reduces gradients. (Their order is in test_nccl_order.)"""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.pipeline_parallel import pipeline_parallel
from picotron.pipeline_parallel.pipeline_parallel import train_step, train_step_pipeline_1f1b, train_step_pipeline_afab
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import CPU, batches, stage_of
from workbench.pipelines.engine import BatchList

STEPS = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}


def test_a_step_frees_the_graph_of_a_micro_batch_before_the_next_forward() -> None:
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    def model(**batch: Any) -> Tensor:
        counts.append(len(graphs))
        loss = torch.ones((), requires_grad=True) * 1.0
        graphs.add(hook := lambda _: None)
        loss.register_hook(hook)  # the graph has the only reference
        return loss

    train_step(model, BatchList(batches(3)), CPU)  # type: ignore[arg-type]
    assert counts == [0, 0, 0]


def live_outputs(engine: str, micro_batches: int) -> tuple[list[int], list[bool]]:
    """Return the number of outputs of this stage that are in memory before each forward of one step, and whether each
    backward reduces gradients.
    """
    model: Any = DataParallelBucket(stage_of(make_config("pp4"), tiny_llama(num_hidden_layers=4)))
    outputs: list[Any] = []  # weak references to their storages
    live, reduces, original, backward_of_model = [], [], pipeline_parallel.forward_step, model.backward

    def forward_step(*arguments: Any) -> Tensor:
        live.append(sum(storage() is not None for storage in outputs))
        y = original(*arguments)
        outputs.append(weakref.ref(y.untyped_storage()))
        return y

    def backward(*arguments: Any) -> Any:
        reduces.append(model.require_backward_grad_sync)
        return backward_of_model(*arguments)

    model.backward = backward
    with mock.patch.object(pipeline_parallel, "forward_step", forward_step):
        STEPS[engine](model, BatchList(batches(micro_batches)), (2, 16, 32), CPU, torch.float64)
    return live, reduces


@pytest.mark.parametrize("engine", STEPS)
def test_sent_outputs_are_freed_and_the_last_backward_reduces(pool: WorkerPool, engine: str) -> None:
    """How many activations are saved shows in the bytes that test_memory counts."""
    live, reduces = zip(*pool.run(live_outputs, 4, engine, 6), strict=True)
    assert list(live[:3]) == [[0] * 6] * 3
    assert list(reduces) == [[False] * 5 + [True]] * 4
