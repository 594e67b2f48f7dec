"""Messages between pipeline stages: receivers, batches, and agreement of sender and receiver on the tensor."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conformance.training import CPU
from conformance.worker_pool import WorkerError, WorkerPool
from picotron.pipeline_parallel.pp_communications import (
    bidirectional_pipeline_communicate,
    pipeline_communicate,
    start_message,
)
from picotron.process_group_manager import setup_process_group_manager


def every_handle_is_waited_on() -> bool:
    grid = setup_process_group_manager(1, 1, 2, 1)
    waited, batches = [], []

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        assert all(operation.group is grid.pp_group for operation in operations)
        batches.append(len(operations))
        return [SimpleNamespace(wait=lambda: waited.append(1)) for _ in operations]

    original, dist.batch_isend_irecv = dist.batch_isend_irecv, batch_isend_irecv
    try:
        x = torch.zeros(1)
        for operation in ("recv_forward", "send_forward", "recv_backward", "send_backward"):
            pipeline_communicate(operation, CPU, torch.float32, x, (1,))
        for operation in ("send_fwd_recv_bwd", "send_bwd_recv_fwd"):
            bidirectional_pipeline_communicate(operation, x, (1,), CPU, torch.float32)
    finally:
        dist.batch_isend_irecv = original
    return batches == [1, 1, 2] and len(waited) == 4


def test_messages_are_batched_on_the_pp_group(pool: WorkerPool) -> None:
    assert pool.run(every_handle_is_waited_on, 2) == [True, True]


def groups_by_direction() -> list[str]:
    """Return the groups of a message to the other rank of two and of a message from it."""
    grid = setup_process_group_manager(1, 1, 2, 1)
    names = {grid.pp_group: "pp_group", grid.pp_reverse_group: "pp_reverse_group"}
    with mock.patch.object(dist, "batch_isend_irecv") as batch:
        for operation in ("send", "recv"):
            start_message(operation, [torch.zeros(1)], 1 - grid.pp_rank)
    return [names[message.group] for call in batch.call_args_list for message in call.args[0]]


def test_messages_to_lower_ranks_have_a_separate_group(pool: WorkerPool) -> None:
    first, last = pool.run(groups_by_direction, 2)
    assert first == ["pp_group", "pp_reverse_group"]
    assert last == ["pp_reverse_group", "pp_group"]


def wrong_message(kind: str) -> None:
    setup_process_group_manager(1, 1, 2, 1)
    x = torch.zeros(2, 3, dtype=torch.float64 if kind == "dtype" else torch.float32)
    shape = (3, 2) if kind == "shape" else (2, 3)
    if kind == "both ways":
        bidirectional_pipeline_communicate("send_fwd_recv_bwd", x, (2, 4), CPU, torch.float32)
    pipeline_communicate("send_forward", CPU, torch.float32, x, shape)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dtype", r"torch.float64 \[2, 3\] on cpu: the receiver expects torch.float32 \[2, 3\] on cpu"),
        ("shape", r"torch.float32 \[2, 3\] on cpu: the receiver expects torch.float32 \[3, 2\] on cpu"),
        ("both ways", r"the receiver expects torch.float32 \[2, 4\] on cpu"),
    ],
)
def test_mismatched_tensors_are_not_sent(pool: WorkerPool, kind: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(wrong_message, 2, kind)
