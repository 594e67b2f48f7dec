"""Cross-entropy over a sharded vocabulary: it equals torch's, and limits memory."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.worker_pool import WorkerPool
from picotron.model import cross_entropy
from picotron.model.cross_entropy import (
    VocabularyShard,
    linear_cross_entropy,
)
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel import tensor_parallel
from tests.support.oracle import assert_close
from workbench.own_loops.log_probs import linear_log_probs


def sharded_cross_entropy(vocab_size: int, ignored: list[int], chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    grid = setup_process_group_manager(dist.get_world_size(), 1, 1, 1)
    x, weight, targets = loss_inputs(vocab_size, ignored)
    shard = tensor_parallel._even_shard(vocab_size)
    local = torch.full(
        (shard.size, weight.size(1)), 7.0, dtype=torch.float64
    )  # non-zero padding, which must not affect the result
    local[: shard.stop - shard.start] = weight[shard.start : shard.stop]
    x.requires_grad_()
    local.requires_grad_()
    before, cross_entropy.CHUNK_TOKENS = cross_entropy.CHUNK_TOKENS, chunk
    try:
        loss = linear_cross_entropy(
            x, local, targets, VocabularyShard(shard.start, shard.stop - shard.start, grid.tp_group)
        )
    finally:
        cross_entropy.CHUNK_TOKENS = before
    (3 * loss).backward()
    dx = x.grad.clone()
    dist.all_reduce(dx)
    assert local.grad[shard.stop - shard.start :].count_nonzero() == 0
    return loss.detach(), dx, local.grad[: shard.stop - shard.start]


def loss_inputs(vocab_size: int, ignored: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(2, 11, 6, dtype=torch.float64, generator=generator)
    weight = 3 * torch.randn(vocab_size, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(vocab_size, (2, 11), generator=generator)
    targets.view(-1)[ignored] = -100
    return x, weight, targets


@pytest.mark.parametrize(
    ("size", "vocab_size", "ignored", "chunk"),
    [(2, 13, [0, 7, 21], 5), (4, 5, [0, 7, 21], 5)],
)
def test_loss_and_gradients_equal_torch_cross_entropy(
    pool: WorkerPool, size: int, vocab_size: int, ignored: list[int], chunk: int
) -> None:
    x, weight, targets = (t.requires_grad_() if t.is_floating_point() else t for t in loss_inputs(vocab_size, ignored))
    loss = F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten())
    (3 * loss).backward()
    results = pool.run(sharded_cross_entropy, size, vocab_size, ignored, chunk)
    for result in results:
        assert_close(result[0], loss.detach(), 1e-12, "loss")
        assert_close(result[1], x.grad, 1e-12, "dx")
    assert_close(torch.cat([result[2] for result in results]), weight.grad, 1e-12, "dweight")


def scaled_gradients(scale: float) -> tuple[Tensor, Tensor]:
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in loss_inputs(40, []))
    x.requires_grad_()
    weight.requires_grad_()
    (linear_cross_entropy(x, weight, targets, VocabularyShard(0, 40, grid.tp_group)) * scale).backward()
    return x.grad.double(), weight.grad.double()


def test_loss_scale_is_not_rounded_to_bfloat16(pool: WorkerPool) -> None:
    """1/3 in bfloat16 is 0.2 % too large; rounding each gradient element instead introduces no bias."""
    whole, third = pool.run(scaled_gradients, 1, 1.0)[0], pool.run(scaled_gradients, 1, 1 / 3)[0]
    for a, b in zip(whole, third, strict=True):
        assert abs(3 * (a * b).sum() / a.square().sum() - 1) < 0.0005


def log_probs_of_bfloat16_logits() -> tuple[Tensor, Tensor]:
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in loss_inputs(40, []))
    expected = (x.flatten(0, 1) @ weight.t()).double().log_softmax(-1).gather(-1, targets.view(-1, 1))
    return linear_log_probs(x, weight, targets, VocabularyShard(0, 40, grid.tp_group)), expected.view(targets.shape)


def test_log_softmax_is_in_float32(pool: WorkerPool) -> None:
    log_probs, expected = pool.run(log_probs_of_bfloat16_logits, 1)[0]
    assert_close(log_probs.double(), expected, 1e-6)


def weight_gradient(function: Any, chunk: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the gradient of a head's weight by many tokens, `chunk` of them at a time."""
    grid, generator = setup_process_group_manager(1, 1, 1, 1), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=generator).bfloat16().to(dtype) for size in (512, 16))
    targets = torch.randint(16, (1, 512), generator=generator)
    weight.requires_grad_()
    with mock.patch.object(cross_entropy, "CHUNK_TOKENS", chunk):
        function(x[None], weight, targets, VocabularyShard(0, 16, grid.tp_group)).sum().backward()
    return weight.grad.double()


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
def test_chunks_are_added_in_float32(pool: WorkerPool, function: Any) -> None:
    exact = pool.run(weight_gradient, 1, function, 512, torch.float64)[0]
    one, many = (pool.run(weight_gradient, 1, function, chunk)[0] for chunk in (512, 4))
    assert (many - exact).norm() < 1.5 * (one - exact).norm()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in this mode: `now`, and their `peak`. Views of older tensors,
    and results that are written into them, do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.known | given:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak_of(function: Any, tokens: int, width: int = 4) -> int:
    """Return the peak number of live elements in forward and backward, excluding the inputs x and weight."""
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight = torch.randn(1, tokens, width, requires_grad=True), torch.randn(1000, width, requires_grad=True)
    targets = torch.zeros(1, tokens, dtype=torch.long)
    with LiveBytes() as memory:
        function(x, weight, targets, VocabularyShard(0, 1000, grid.tp_group)).sum().backward()
    return memory.peak // 4


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
def test_memory_does_not_grow_with_tokens_times_vocabulary(pool: WorkerPool, function: Any) -> None:
    few, many = (pool.run(peak_of, 1, function, tokens)[0] for tokens in (1024, 10240))
    assert 512 * 1000 <= few <= 3 * 512 * 1000 + 20 * 1024
    assert many - few <= 30 * (10240 - 1024)  # a few elements per token, not 1,000


def test_backward_scales_the_gradients_in_place(pool: WorkerPool) -> None:
    """The gradient of the weight, (V, D), exists once."""
    assert pool.run(peak_of, 1, linear_cross_entropy, 1, 4000)[0] < 1.1 * 1000 * 4000
