"""Attention within documents is compiled once for all lengths."""

import functools

import torch

from tests.support.oracle import CPU, assert_close, our_model, tiny_llama
from workbench.variants.packed import PackedDocuments, packed_attention

ROWS, TOKENS = 2, 24
BOUNDARIES = [0, 1, 7, 24, 24 + 11, 24 + 23, 48]


def documents_of(boundaries: list[int]) -> PackedDocuments:
    return PackedDocuments.of(torch.tensor(boundaries, dtype=torch.int32), CPU)


@torch._dynamo.config.patch(error_on_recompile=True)  # monkeypatch would remove the key from the config
def test_other_lengths_do_not_compile_again() -> None:
    torch._dynamo.reset()
    model = our_model(tiny_llama(num_hidden_layers=1))
    (layer,) = model.model.layers.values()
    x = torch.randn(ROWS, TOKENS, 32, dtype=torch.float64)
    cos, sin = torch.randn(2, ROWS, TOKENS, 1, 4, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager")
    for boundaries in (BOUNDARIES, [0, 2, 7, 24, 36, 47, 48], [0, 24, 48], [0, 1, 2, 3, 24, 30, 48]):
        attend = functools.partial(packed_attention, documents=documents_of(boundaries))
        assert_close(compiled(x, cos, sin, attend).detach(), layer(x, cos, sin, attend).detach())
