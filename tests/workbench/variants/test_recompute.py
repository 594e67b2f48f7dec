"""Selective recomputation: what is kept, and its gradients."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracle import assert_close, our_model, tiny_llama
from workbench.pipelines.split_backward import split_backward
from workbench.variants.recompute import recompute_cheap_results


def saved_and_gradients(layer: nn.Module, x: Tensor, tables: Tensor) -> tuple[float, list[Tensor]]:
    """Numbers that autograd saves per token of x (B, T, D), and the gradients of x and of the parameters."""
    weights = {weight.untyped_storage()._cdata for weight in layer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (memory := tensor.untyped_storage())._cdata not in weights:
            saved[memory._cdata] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x, *tables)
    numbers = sum(memory.nbytes() for memory in saved.values()) / 8 / x[..., 0].numel()
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
