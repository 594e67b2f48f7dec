"""Selective recomputation: what is kept, measured in processes of their own, and gradients of a graph used twice."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from conformance.oracle import assert_close, our_model, tiny_llama
from picotron.model.llama import Llama
from picotron.model.recompute import recompute_cheap_results
from picotron.model.split_backward import split_backward

PROGRAM = """
import ctypes, sys, torch
from transformers import LlamaConfig
from picotron.model.llama import Llama
from picotron.model.recompute import recompute_cheap_results

def mebibytes():
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

sizes = dict(hidden_size=256, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=4, vocab_size=256)
model = Llama(LlamaConfig(num_key_value_heads=4, **sizes))
if sys.argv[1] == "selective":
    recompute_cheap_results(model)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
ids = torch.randint(256, (1, 2048))
model(ids[:, :64], target_ids=ids[:, :64]).backward()
before = mebibytes()
loss = model(ids, target_ids=ids)
after = mebibytes()
loss.backward()
print(after - before, mebibytes() - before)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_norms_and_gated_activations_are_not_kept() -> None:
    """Per token and layer, 6 D + 4 D + 4 F numbers are kept on a CPU, without what is recomputed 2 D + 4 D + 2 F. F
    is 8 D here. After backward, all of it is free, although the loss still exists.
    """
    kept = {}
    for how in ("none", "selective"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        kept[how], rest = map(float, done.stdout.split())
        assert rest < 0.1 * kept[how]
    assert kept["selective"] == pytest.approx(kept["none"] * 22 / 42, rel=0.1)


def test_a_graph_that_is_kept_computes_the_same_gradients_again() -> None:
    torch.manual_seed(0)
    model = Llama(tiny_llama()).double()
    recompute_cheap_results(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(61, (2, 9))
    loss = model(ids, target_ids=ids)
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, 2 * once[name], what=name)


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


@pytest.mark.parametrize("splits", [False, True], ids=["", "split backward"])
def test_a_compiled_layer_keeps_as_few_numbers(splits: bool) -> None:
    """Per token, these are x, the input of the second norm, q, k, v, y, gate, up, and less than 40 others."""
    D, F, heads, kv = 64, 160, 4, 2
    config = tiny_llama(hidden_size=D, intermediate_size=F, num_attention_heads=heads, num_key_value_heads=kv)
    x, tables = torch.randn(2, 9, D, dtype=torch.float64).requires_grad_(), torch.ones(2, 1, 9, 1, 8).double()
    plain, ours = our_model(config).model.layers["0"], our_model(config).model.layers["0"]
    if splits:
        split_backward(ours)
    recompute_cheap_results(ours, splits)
    torch._dynamo.reset()
    ours.forward = torch.compile(ours.forward, backend="aot_eager_decomp_partition")
    numbers, gradients = saved_and_gradients(ours, x, tables)
    assert numbers == pytest.approx(2 * D + 2 * heads * 16 + 2 * kv * 16 + 2 * F, abs=40)
    for gradient, expected in zip(gradients, saved_and_gradients(plain, x, tables)[1], strict=True):
        assert_close(gradient, expected)
