"""Cross-entropy in chunks: its rounding in bfloat16, and its memory. (The fuzzer compares its numbers.)"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.model import cross_entropy
from picotron.model.cross_entropy import VocabularyShard, linear_cross_entropy
from tests.support.memory import LiveBytes
from tests.support.oracle import assert_close
from workbench.own_loops.log_probs import linear_log_probs

pytestmark = pytest.mark.usefixtures("_one_rank")


def shard_of(weight: Tensor) -> VocabularyShard:
    """Return all of a vocabulary."""
    return VocabularyShard(0, len(weight), pgm.process_group_manager.tp_group)


def loss_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (3 * torch.randn(size, 6, generator=generator) for size in (22, 40))
    targets = torch.randint(40, (1, 22), generator=generator)
    return x[None].bfloat16(), weight.bfloat16(), targets


def scaled_gradients(scale: float) -> tuple[Tensor, ...]:
    x, weight, targets = loss_inputs()
    loss = linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets, shard_of(weight))
    return torch.autograd.grad(loss * scale, [x, weight])


def test_loss_scale_is_not_rounded_to_bfloat16() -> None:
    """1/3 in bfloat16 is 0.2 % too large; rounding each gradient element instead introduces no bias."""
    for whole, third in zip(scaled_gradients(1.0), scaled_gradients(1 / 3), strict=True):
        a, b = whole.double(), third.double()
        assert abs(3 * (a * b).sum() / a.square().sum() - 1) < 0.0005


def test_log_softmax_is_in_float32() -> None:
    x, weight, targets = loss_inputs()
    expected = (x @ weight.t()).double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert_close(linear_log_probs(x, weight, targets, shard_of(weight)).double(), expected, 1e-6)


def weight_gradient(function: Any, chunk: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the gradient of a head's weight by many tokens, `chunk` of them at a time."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=generator).bfloat16().to(dtype) for size in (512, 16))
    targets = torch.randint(16, (1, 512), generator=generator)
    weight.requires_grad_()
    with mock.patch.object(cross_entropy, "CHUNK_TOKENS", chunk):
        function(x[None], weight, targets, shard_of(weight)).sum().backward()
    return weight.grad.double()


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
def test_chunks_are_added_in_float32(function: Any) -> None:
    exact = weight_gradient(function, 512, torch.float64)
    one, many = (weight_gradient(function, chunk) for chunk in (512, 4))
    assert (many - exact).norm() < 1.5 * (one - exact).norm()


def peak_of(function: Any, tokens: int, width: int = 4) -> int:
    """Return the peak number of live elements in forward and backward, excluding the inputs x and weight."""
    x, weight = torch.randn(1, tokens, width, requires_grad=True), torch.randn(1000, width, requires_grad=True)
    targets = torch.zeros(1, tokens, dtype=torch.long)
    with LiveBytes([x, weight, targets]) as live:
        function(x, weight, targets, shard_of(weight)).sum().backward()
    return live.peak // 4


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
def test_memory_does_not_grow_with_tokens_times_vocabulary(function: Any) -> None:
    few, many = (peak_of(function, tokens) for tokens in (1024, 10240))
    assert 512 * 1000 <= few <= 3 * 512 * 1000 + 20 * 1024
    assert many - few <= 30 * (10240 - 1024)  # a few elements per token, not 1,000


def test_backward_scales_the_gradients_in_place() -> None:
    """The gradient of the weight, (V, D), exists once."""
    assert peak_of(linear_cross_entropy, 1, 4000) < 1.1 * 1000 * 4000
