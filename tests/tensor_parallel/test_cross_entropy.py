"""Cross-entropy over a sharded vocabulary: it equals torch's, and limits memory and communication."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.context_parallel import LiveBytes
from conformance.oracle import assert_close
from conformance.worker_pool import WorkerPool
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel import cross_entropy, tensor_parallel
from picotron.tensor_parallel.cross_entropy import (
    CHUNK_LOGITS,
    VocabularyShard,
    chunk_loss,
    chunk_tokens,
    linear_cross_entropy,
    linear_log_probs,
)


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


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("ignored", [[], [0, 7, 21]], ids=["", "ignored"])
@pytest.mark.parametrize(("size", "vocab_size"), [(1, 13), (2, 13), (4, 16), (4, 5)])
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


@pytest.mark.parametrize("vocabulary", [127, 49152, 128256, 2**20])
def test_chunks_on_a_gpu_are_multiples_of_a_tile(vocabulary: int) -> None:
    """For 128,256 tokens, chunks of 2,092 rows would compute a 17th tile of 128 rows for 44 of them."""
    step = chunk_tokens("cuda", vocabulary)
    assert step % 256 == 0
    assert step == 512 or 0.85 * CHUNK_LOGITS < step * vocabulary <= CHUNK_LOGITS


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


def peak_of_loss(tokens: int, width: int = 4) -> int:
    """Return the peak number of live elements in forward and backward, excluding the inputs x and weight."""
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight = torch.randn(1, tokens, width, requires_grad=True), torch.randn(1000, width, requires_grad=True)
    targets = torch.zeros(1, tokens, dtype=torch.long)
    with LiveBytes() as memory:
        linear_cross_entropy(x, weight, targets, VocabularyShard(0, 1000, grid.tp_group)).backward()
    return memory.peak // 4


def test_live_bytes_are_those_of_new_tensors() -> None:
    weight, buffer = torch.zeros(100, 10), torch.zeros(100)
    with LiveBytes() as memory:
        buffer.add_(weight.t().sum(0))  # a view, a new tensor of 400 bytes, and a result in an older tensor
        assert (memory.now, memory.peak) == (0, 400)
        kept = [torch.zeros(5), torch.zeros(5).view(5, 1)[:2], weight[1:]]
        assert memory.now == 40
        del kept
    assert (memory.now, memory.peak) == (0, 400)


def test_memory_of_the_loss_does_not_grow_with_tokens_times_vocabulary(pool: WorkerPool) -> None:
    few, many = (pool.run(peak_of_loss, 1, tokens)[0] for tokens in (1024, 10240))
    assert 512 * 1000 <= few <= 3 * 512 * 1000 + 20 * 1024
    assert many - few <= 20 * (10240 - 1024)  # a few elements per token, not 1,000


def test_backward_scales_the_gradients_in_place(pool: WorkerPool) -> None:
    """The gradient of the weight, (V, D), exists once."""
    assert pool.run(peak_of_loss, 1, 1, 4000)[0] < 1.1 * 1000 * 4000


def second_backward() -> str:
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight, targets = loss_inputs(16, [])
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, VocabularyShard(0, 16, grid.tp_group))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="a second backward") as error:
        loss.backward()
    return str(error.value)


def test_a_second_backward_is_rejected(pool: WorkerPool) -> None:
    """Its gradients would be scaled twice."""
    assert pool.run(second_backward, 1)


def loss_traffic() -> list[tuple[str, int]]:
    grid = setup_process_group_manager(2, 1, 1, 1)
    sent: list[tuple[str, int]] = []
    original = cross_entropy.all_reduce

    def counted(tensor: Tensor, *arguments: Any) -> Any:
        sent.append((str(tensor.dtype), tensor.numel()))
        return original(tensor, *arguments)

    x, weight, targets = loss_inputs(16, [])
    cross_entropy.all_reduce = counted
    try:
        linear_cross_entropy(x, weight[:8], targets, VocabularyShard(8 * grid.tp_rank, 8, grid.tp_group))
    finally:
        cross_entropy.all_reduce = original
    return sent


def test_loss_sends_three_numbers_per_token(pool: WorkerPool) -> None:
    assert pool.run(loss_traffic, 2)[0] == [("torch.float64", 22), ("torch.float64", 44)]


def sharded_log_probs(vocab_size: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    grid = setup_process_group_manager(dist.get_world_size(), 1, 1, 1)
    x, weight, targets = loss_inputs(vocab_size, [])
    shard = tensor_parallel._even_shard(vocab_size)
    local = torch.full((shard.size, weight.size(1)), 7.0, dtype=torch.float64)  # with padding
    local[: shard.stop - shard.start] = weight[shard.start : shard.stop]
    x.requires_grad_()
    local.requires_grad_()
    with mock.patch.object(cross_entropy, "CHUNK_TOKENS", chunk):
        vocabulary = VocabularyShard(shard.start, shard.stop - shard.start, grid.tp_group)
        log_probs = linear_log_probs(x, local, targets, vocabulary)
        (log_probs.square() + 3 * log_probs).mean().backward()
    dx = x.grad.clone()
    dist.all_reduce(dx)
    return log_probs.detach(), dx, local.grad[: shard.stop - shard.start]


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize(("size", "vocab_size"), [(1, 13), (2, 13), (4, 5)])
def test_log_probs_and_gradients_equal_torch(pool: WorkerPool, size: int, vocab_size: int, chunk: int) -> None:
    x, weight, targets = (t.requires_grad_() if t.is_floating_point() else t for t in loss_inputs(vocab_size, []))
    log_probs = (x @ weight.t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    (log_probs.square() + 3 * log_probs).mean().backward()
    results = pool.run(sharded_log_probs, size, vocab_size, chunk)
    for result in results:
        assert_close(result[0], log_probs.detach(), 1e-12, "log_probs")
        assert_close(result[1], x.grad, 1e-12, "dx")
    assert_close(torch.cat([result[2] for result in results]), weight.grad, 1e-12, "dweight")


def peak_of_log_probs(tokens: int) -> int:
    """Return the peak number of live elements in forward and backward, excluding the inputs x and weight."""
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight = torch.randn(1, tokens, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    targets = torch.zeros(1, tokens, dtype=torch.long)
    with LiveBytes() as memory:
        linear_log_probs(x, weight, targets, VocabularyShard(0, 1000, grid.tp_group)).sum().backward()
    return memory.peak // 4


def test_memory_of_log_probs_does_not_grow_with_tokens_times_vocabulary(pool: WorkerPool) -> None:
    few, many = (pool.run(peak_of_log_probs, 1, tokens)[0] for tokens in (1024, 10240))
    assert many - few <= 30 * (10240 - 1024)  # a few elements per token, not 1,000


def weighted_cross_entropy() -> tuple[Tensor, Tensor]:
    grid = setup_process_group_manager(1, 1, 1, 1)
    x, weight, targets = loss_inputs(16, [3, 4])
    weights = torch.rand(2, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights.view(-1)[[3, 4, 9]] = 0
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, VocabularyShard(0, 16, grid.tp_group), weights)
    loss.backward()
    expected = loss_inputs(16, [3, 4])[0].requires_grad_()
    losses = F.cross_entropy((expected @ weight.t()).flatten(0, 1), targets.flatten(), reduction="none")
    (losses * weights.flatten()).sum().backward()
    assert_close(x.grad, expected.grad, 1e-12)
    return loss.detach(), (losses * weights.flatten()).sum().detach()


def test_targets_without_weight_can_be_any_number(pool: WorkerPool) -> None:
    [(loss, expected)] = pool.run(weighted_cross_entropy, 1)
    assert_close(loss, expected, 1e-12)


def loss_and_gradients(compiled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of an untied model's head and its gradients, of chunks of 8, 8 and 6 tokens."""
    grid = setup_process_group_manager(dist.get_world_size(), 1, 1, 1)
    x, weight, targets = loss_inputs(13, [3])
    shard = tensor_parallel._even_shard(13)
    local = torch.zeros(shard.size, weight.size(1), dtype=torch.float64)
    local[: shard.stop - shard.start] = weight[shard.start : shard.stop]
    vocabulary = VocabularyShard(shard.start, shard.stop - shard.start, grid.tp_group)
    function = torch.compile(chunk_loss, fullgraph=True) if compiled else chunk_loss
    x.requires_grad_()
    local.requires_grad_()
    with mock.patch.object(cross_entropy, "CHUNK_TOKENS", 8):
        loss = linear_cross_entropy(x, local, targets, vocabulary, loss_fn=function)
    loss.backward()
    return loss.detach(), x.grad, local.grad


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_compiled_loss_equals_the_eager_one(pool: WorkerPool, size: int) -> None:
    for compiled, eager in zip(*(pool.run(loss_and_gradients, size, each) for each in (True, False)), strict=True):
        for ours, theirs in zip(compiled, eager, strict=True):
            assert_close(ours, theirs, 1e-12)
