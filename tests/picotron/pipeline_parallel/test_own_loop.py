"""A 1F1B loop of a user, with the names, calls and flags of Hugging Face's picotron, trains our model as train.py's own
loop does: it never calls finish_grad_sync, it sets require_backward_grad_sync to True on the last stage in any case,
and to False only if there are replicas.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.pipeline_parallel.pp_communications import bidirectional_pipeline_communicate, pipeline_communicate
from tests.fuzz.cases import Case
from tests.fuzz.check import check
from tests.fuzz.test_fuzz import case_of
from tests.fuzz.work import run_part


def own_1f1b(model: Any, data_loader: Any, tensor_shapes: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    grid, micro_batches = pgm.process_group_manager, data_loader.grad_acc_steps
    total = torch.zeros((), dtype=dtype)
    ahead = min(grid.pp_world_size - grid.pp_rank - 1, micro_batches)
    has_replicas = grid.cp_dp_world_size > 1
    message = {"device": device, "dtype": dtype}
    waiting: list[tuple[Tensor | None, Tensor]] = []

    def forward(input_tensor: Tensor | None) -> Tensor:
        batch = next(data_loader)
        y: Tensor = model.forward(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], hidden_states=input_tensor
        )
        if grid.pp_is_last_stage:
            y = F.cross_entropy(y.transpose(1, 2), batch["target_ids"], reduction="mean") / micro_batches
            total.add_(y.detach())
        return y

    for _ in range(ahead):
        x = pipeline_communicate(operation="recv_forward", shapes=tensor_shapes, **message)
        y = forward(x)
        pipeline_communicate(operation="send_forward", tensor=y, **message)
        waiting.append((x, y))
    if ahead < micro_batches:
        x = pipeline_communicate(operation="recv_forward", shapes=tensor_shapes, **message)
    if has_replicas:
        model.require_backward_grad_sync = False
    for i in range(micro_batches - ahead):
        is_last = i == micro_batches - ahead - 1
        y = forward(x)
        dy = bidirectional_pipeline_communicate(
            operation="send_fwd_recv_bwd", send_tensor=y, recv_shapes=tensor_shapes, **message
        )
        waiting.append((x, y))
        if ahead == 0 and is_last:
            model.require_backward_grad_sync = True
        dx = model.backward(*waiting.pop(0), dy)
        if is_last:
            pipeline_communicate(operation="send_backward", tensor=dx, **message)
        else:
            x = bidirectional_pipeline_communicate(
                operation="send_bwd_recv_fwd", send_tensor=dx, recv_shapes=tensor_shapes, **message
            )
    for i in range(ahead):
        if has_replicas:
            model.require_backward_grad_sync = i == ahead - 1
        dy = pipeline_communicate(operation="recv_backward", shapes=tensor_shapes, **message)
        dx = model.backward(*waiting.pop(0), dy)
        pipeline_communicate(operation="send_backward", tensor=dx, **message)
    return total


def run_with_own_loop(case: Case, folder: Path, part: int) -> dict[str, Any]:
    with mock.patch.object(train, "train_step_pipeline_1f1b", own_1f1b):
        return run_part(case, folder, part)


@pytest.mark.parametrize("engine", ["naive", "", "zero1", "zero3"])
@pytest.mark.parametrize("layout", ["pp3", "dp2 pp2"])
def test_the_loop_equals_transformers(pool: WorkerPool, engine: str, layout: str) -> None:
    data, keys = {"kind": "text", "tokenizer": "byte-level"}, {"max_grad_norm": 0.1, "dataset.mask_documents": False}
    case = case_of(f"{layout} {engine} m3", tied=True, data=data, model={"num_hidden_layers": 4}, **keys)
    result = check(pool, case, run_with_own_loop)
    assert result.outcome == "equal", result.text
