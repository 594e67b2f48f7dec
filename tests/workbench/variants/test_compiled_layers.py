"""Compiled layers: what selective recomputation keeps of them, and one graph for all lengths of documents."""

import functools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.memory import SavedBytes
from tests.support.oracle import CPU, assert_close, our_model, tiny_llama
from workbench.pipelines.split_backward import split_backward
from workbench.variants.packed import PackedDocuments, packed_attention
from workbench.variants.recompute import recompute_cheap_results


def saved_and_gradients(layer: nn.Module, x: Tensor, tables: Tensor) -> tuple[float, list[Tensor]]:
    """Numbers that autograd saves per token of x (B, T, D), and the gradients of x and of the parameters."""
    saved = SavedBytes(layer)
    with saved.hooks():
        y = layer(x, *tables)
    numbers = saved.current / 8 / x[..., 0].numel()
    return numbers, list(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))


@pytest.mark.parametrize("recomputes", [False, True], ids=["none", "selective"])
@pytest.mark.parametrize("splits", [False, True], ids=["", "split backward"])
def test_a_compiled_layer_keeps_as_few_numbers(splits: bool, recomputes: bool) -> None:
    """Per token, these are x, the input of the second norm, q, k, v, y, gate, up, and less than 40 others; without
    recomputation also the results of the norms, and h.
    """
    D, F, heads, kv = 64, 160, 4, 2
    config = tiny_llama(hidden_size=D, intermediate_size=F, num_attention_heads=heads, num_key_value_heads=kv)
    x, tables = torch.randn(2, 9, D, dtype=torch.float64).requires_grad_(), torch.ones(2, 1, 9, 1, 8).double()
    plain, ours = our_model(config).model.layers["0"], our_model(config).model.layers["0"]
    if splits:
        split_backward(ours)
    if recomputes:
        recompute_cheap_results(ours, splits)
    torch._dynamo.reset()
    ours.forward = torch.compile(ours.forward, backend="aot_eager_decomp_partition")
    numbers, gradients = saved_and_gradients(ours, x, tables)
    more = 0 if recomputes else 2 * D + F
    assert numbers == pytest.approx(2 * D + 2 * heads * 16 + 2 * kv * 16 + 2 * F + more, abs=40)
    for gradient, expected in zip(gradients, saved_and_gradients(plain, x, tables)[1], strict=True):
        assert_close(gradient, expected)


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


@pytest.mark.parametrize(("capability", "has_kernel"), [((7, 5), False), ((8, 0), True)])
def test_gpus_before_ampere_attend_per_document(capability: tuple[int, int], has_kernel: bool) -> None:
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        assert PackedDocuments.of(mock.MagicMock(), torch.device("cuda")).has_kernel == has_kernel
