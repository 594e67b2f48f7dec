"""Messages between pipeline stages: sender and receiver must agree on the tensor."""

import pytest
import torch

from conformance.worker_pool import WorkerError, WorkerPool
from picotron.pipeline_parallel.pp_communications import (
    bidirectional_pipeline_communicate,
    pipeline_communicate,
)
from picotron.process_group_manager import setup_process_group_manager
from tests.support.training import CPU


def wrong_message(kind: str) -> None:
    setup_process_group_manager(1, 1, 2, 1)
    x = torch.zeros(2, 3, dtype=torch.float64)
    if kind == "both ways":
        bidirectional_pipeline_communicate("send_fwd_recv_bwd", x, (2, 3), CPU, torch.float32)
    pipeline_communicate("send_forward", CPU, torch.float32, x)


@pytest.mark.parametrize("kind", ["one way", "both ways"])
def test_mismatched_tensors_are_not_sent(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(WorkerError, match="float64 on cpu"):
        pool.run(wrong_message, 2, kind)
