"""Attention within documents: equal to a mask, and compiled once for all lengths."""

import pytest
import torch
from torch import Tensor, nn

from conformance.oracle import CPU, assert_close, our_model, tiny_llama
from picotron.model.attention import PackedDocuments
from picotron.model.llama import AttentionFn, fused_attention, math_attention

ROWS, TOKENS = 2, 24
BOUNDARIES = [0, 1, 7, 24, 24 + 11, 24 + 23, 48]


def documents_of(boundaries: list[int]) -> PackedDocuments:
    return PackedDocuments.of(torch.tensor(boundaries, dtype=torch.int32), CPU)


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with a mask of pairs in the same document, in which the key is not later than the query."""
    number = torch.bucketize(torch.arange(ROWS * TOKENS), torch.tensor(BOUNDARIES[1:]), right=True).view(ROWS, TOKENS)
    visible = (number[:, :, None] == number[:, None, :]) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    k, v = (heads.repeat_interleave(2, dim=1) for heads in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])


@pytest.mark.parametrize("attention_fn", [fused_attention, math_attention])
def test_attention_within_documents_equals_a_mask(attention_fn: AttentionFn) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(ROWS, heads, TOKENS, 8, generator=generator).double() for heads in (4, 2, 2)]
    dy = torch.randn(ROWS, 4, TOKENS, 8, generator=generator).double()
    results = []
    for function in (lambda *qkv: attention_fn(*qkv, documents_of(BOUNDARIES)), masked_attention):
        leaves = [each.clone().requires_grad_() for each in inputs]
        y = function(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for name, ours, expected in zip(("y", "dq", "dk", "dv"), *results, strict=True):
        assert_close(ours, expected, 1e-12, name)


@torch._dynamo.config.patch(error_on_recompile=True)  # monkeypatch would remove the key from the config
def test_other_lengths_do_not_compile_again() -> None:
    torch._dynamo.reset()
    model = our_model(tiny_llama(num_hidden_layers=1))
    (layer,) = model.model.layers.values()
    x = torch.randn(ROWS, TOKENS, 32, dtype=torch.float64)
    cos, sin = torch.randn(2, ROWS, TOKENS, 1, 4, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager")
    for boundaries in (BOUNDARIES, [0, 2, 7, 24, 36, 47, 48], [0, 24, 48], [0, 1, 2, 3, 24, 30, 48]):
        documents = documents_of(boundaries)
        assert_close(compiled(x, cos, sin, documents).detach(), layer(x, cos, sin, documents).detach())
