"""Attention to one block of keys on GPUs, as far as a CPU shows it: the kernels, their shapes, and what is done with
their numbers.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from picotron.context_parallel import block_attention
from picotron.context_parallel.block_attention import block_backward, block_forward
from picotron.model.llama import fused_attention
from workbench.variants import packed

B, H, K, T, S, D = 2, 8, 4, 64, 32, 16


def fake(mode: FakeTensorMode, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("cudnn", "dtype", "kernel"),
    [
        (True, torch.bfloat16, "_scaled_dot_product_cudnn_attention"),
        (False, torch.bfloat16, "_scaled_dot_product_flash_attention"),
        (False, torch.float16, "_scaled_dot_product_efficient_attention"),
        (False, torch.float32, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_each_kernel_returns_the_same_shapes(cudnn: bool, dtype: torch.dtype, kernel: str) -> None:
    options, aten = {"dtype": dtype, "device": "meta"}, mock.Mock(wraps=block_attention.aten)
    with mock.patch.multiple(block_attention, aten=aten, prefers_cudnn=lambda *_: cudnn):
        q, k, v = (torch.empty(B, heads, tokens, D, **options) for heads, tokens in ((H, T), (K, S), (K, S)))
        out, lse = block_forward(q, k, v, False)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        gradients = block_backward(torch.empty_like(q), q, out, lse, k, v, False)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    assert [name for name, *_ in aten.mock_calls] == [kernel, f"{kernel}_backward"]


class Elsewhere(Tensor):
    """A tensor that says that it is not on the CPU."""

    device = property(lambda self: torch.device("meta"))  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


class MathKernels:
    """The kernels for float32 on GPUs, in math: as many key/value heads as query heads, and padded log-sum-exps."""

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf) if causal else scores
        lse = scores.logsumexp(-1)
        return (scores - lse[..., None]).exp() @ v, torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32))

    def _scaled_dot_product_efficient_attention_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor, *options: Any
    ) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        y, own_lse = self._scaled_dot_product_efficient_attention(*leaves, None, True, 0.0, options[-1])
        assert torch.allclose(lse, own_lse.detach())
        return *torch.autograd.grad(y, leaves, dy), None


@pytest.mark.parametrize("causal", [False, True])
def test_shared_heads_in_float32_are_those_of_their_groups(causal: bool) -> None:
    q, k, v, dy = (torch.randn(B, heads, S, D, dtype=torch.float64) for heads in (H, K, K, H))
    expected = block_forward(q, k, v, causal)
    theirs = block_backward(dy, q, *expected, k, v, causal)
    elsewhere = [x.as_subclass(Elsewhere) for x in (q, k, v)]
    with mock.patch.object(block_attention, "aten", MathKernels()):
        out, lse = block_forward(*elsewhere, causal)  # type: ignore[arg-type]
        ours = block_backward(dy, elsewhere[0], out, lse, *elsewhere[1:], causal)
    for found, right in zip((out, lse, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("choice", "expected"), [(3, True), (1, False)])
def test_cudnn_is_used_where_torch_would_choose_it(choice: int, expected: bool) -> None:
    mode = FakeTensorMode()
    q, k = fake(mode, B, H, T, D), fake(mode, B, K, 256, D)
    with mock.patch("torch._fused_sdp_choice", return_value=choice) as ask:
        assert block_attention.prefers_cudnn(q, k, k, True) is expected
        part = fake(mode, B, K, 200, D)  # of a tile
        assert not block_attention.prefers_cudnn(q, part, part, True)
        assert ask.call_args.kwargs == {"enable_gqa": True}
        assert not block_attention.prefers_cudnn(torch.zeros(1), torch.zeros(1), torch.zeros(1), True)


def test_float16_needs_no_flash_kernel() -> None:
    """The GPUs before Ampere, which need float16, have none. Only flash kernels share heads and know documents."""
    mode = FakeTensorMode()
    q, k = (fake(mode, 1, heads, S, D, dtype=torch.float16) for heads in (H, K))
    with mock.patch("torch.nn.functional.scaled_dot_product_attention") as attend:
        fused_attention(q, k, k)
    assert attend.call_args.args[1].shape == q.shape
    assert not attend.call_args.kwargs["enable_gqa"]
    with mock.patch.object(packed, "attend_per_document") as attend:
        packed.packed_attention(q, k, k, mock.Mock())
    attend.assert_called_once()
