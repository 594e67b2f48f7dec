"""Buckets: parameters that some ranks do not use, their order and sizes, and what is refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Distributed
from picotron.console import UserError
from picotron.data_parallel import guards
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.llama import Llama
from picotron.model.placement import place
from picotron.optimizer import AdamW
from picotron.process_group_manager import new_groups, setup_process_group_manager
from tests.fuzz.pipelines import TRAINING, WRAPPERS
from tests.support.oracle import make_config, tiny_llama
from workbench.explain.fake_group import fake_rank


def different_weights(wrapper: str, tp: int, dtype: torch.dtype) -> None:
    grid = setup_process_group_manager(tp, 1, 1, 2 // tp)
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to(dtype)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)
    module[1].bias.data[1] += grid.global_rank * 2**-8
    with pytest.raises(UserError, match=r"^1\.bias differs between ranks \[0, 1\]"):
        WRAPPERS[wrapper](module)


@pytest.mark.parametrize(
    ("wrapper", "tp", "dtype"),
    [("bucket", 2, torch.bfloat16), ("zero3", 1, torch.float64)],
)
def test_ranks_that_start_with_different_weights_are_an_error(
    pool: WorkerPool, wrapper: str, tp: int, dtype: torch.dtype
) -> None:
    pool.run(different_weights, 2, wrapper, tp, dtype)


@pytest.mark.parametrize(("dp", "mib"), [(2, 25), (16, 64)])
def test_buckets_have_a_minimum_size_that_grows_with_the_group(dp: int, mib: int) -> None:
    config = tiny_llama(hidden_size=1024, intermediate_size=8192, num_attention_heads=8, num_hidden_layers=6)
    with fake_rank(0, make_config(distributed__dp_size=dp).distributed), torch.device("meta"):
        model = DataParallelBucket(Llama(config))
    in_order = [p for bucket in model.buckets for p in bucket.parameters]
    assert in_order == list(model.parameters())[::-1]
    sizes = [bucket.buffer.nbytes / 2**20 for bucket in model.buckets]
    assert len(sizes) > 3
    assert mib <= min(sizes[:-1])
    assert max(sizes) < mib + 33  # the largest matrix has 32 MiB, and the vectors before it are in its bucket


def test_a_backward_after_partial_gradients_were_summed_is_refused() -> None:
    """Without replicas, too: the sum has other ranks' terms, and would be summed again."""
    layer = nn.Linear(5, 5, bias=False)
    refused = pytest.raises(UserError, match="after the gradients of this step were averaged")
    with mock.patch.object(guards, "check_equal"), fake_rank(0, Distributed(tp_size=2)):
        place(layer.weight, sum_over=pgm.process_group_manager.tp_group)
        model = DataParallelBucket(layer)
        for _ in range(2):  # nothing has been summed yet
            model(torch.ones(1, 5)).sum().backward()
        model.finish_grad_sync()
        with refused:
            model(torch.ones(1, 5)).sum().backward()


def test_buckets_are_reduced_during_backward() -> None:
    """A layer that each rank holds alone holds back none of them."""
    layers, pending = nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]), []
    with mock.patch.object(guards, "check_equal"), fake_rank(0, Distributed(dp_size=2)):
        alone = new_groups([[0], [1]])
        for parameter in layers[2].parameters():
            place(parameter, average_over=alone)
        model = DataParallelBucket(layers, bucket_mb=0.0)  # a bucket for each parameter
        layers[0].register_full_backward_pre_hook(lambda *_: pending.append(len(model.pending_buckets)))
        model(torch.ones(1, 5, requires_grad=True)).sum().backward()
        assert pending == [2]  # those of this layer
        assert not model.pending_buckets
        assert [bucket.work is not None for bucket in model.buckets] == [False, False, True, True, True, True]
        model.finish_grad_sync()
        assert not any(bucket.work for bucket in model.buckets)


def test_a_compiled_wrapper_clears_its_gradients() -> None:
    with fake_rank(0, make_config().distributed):
        model: Any = torch.compile(DataParallelBucket(nn.Linear(5, 5)), backend="eager")
        AdamW(model, TRAINING, fused=False)
        model(torch.ones(1, 5)).sum().backward()
        assert model.gradient_buffers()[0].any()
        model.zero_grad()
        assert not model.gradient_buffers()[0].any()
