"""Messages between pipeline stages: sender and receiver must agree on the tensor."""

import pytest
import torch

from picotron.config import Distributed
from picotron.pipeline_parallel.pp_communications import pipeline_communicate
from tests.support.training import CPU
from workbench.explain.fake_group import fake_rank


def test_mismatched_tensors_are_not_sent() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64)
    with fake_rank(0, Distributed(pp_size=2)), pytest.raises(ValueError, match="float64 on cpu"):
        pipeline_communicate("send_forward", CPU, torch.float32, x)
