"""Products in float8: their numbers, their errors, training with them, and what is refused."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from tests.support.oracle import assert_close, make_config, tiny_llama
from tests.support.training import train_steps
from workbench.pipelines.engine import check_layout
from workbench.variants.float8 import E4M3, E5M2, float8_linear, float8_product, quantise

MODEL = tiny_llama(intermediate_size=64)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers of sizes that differ by several powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (2 * torch.randn(shape, generator=generator)).exp()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in float64 that x becomes in float8."""
    scale = x.abs().max() / LARGEST[dtype]
    return (x / scale).to(dtype).double() * scale.double()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_products_on_the_cpu_are_those_of_the_kernel(dtype: torch.dtype) -> None:
    a, b = random(32, 48).bfloat16(), random(16, 48, seed=1).bfloat16()
    (a8, a_scale), (b8, b_scale) = quantise(a, dtype), quantise(b, E4M3)
    assert quantise(a * 2**-20, dtype)[0].float().equal(a8.float())  # gradients are small
    theirs = torch._scaled_mm(a8, b8.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)
    assert_close(float8_product(a, b, dtype).double(), theirs.double(), 2**-8)  # the rounding of the result


def test_gradients_are_products_of_rounded_operands() -> None:
    x, weight, dy = random(2, 9, 32).requires_grad_(), random(48, 32, seed=1).requires_grad_(), random(2, 9, 48, seed=2)
    bias = torch.ones(48, requires_grad=True)
    y = float8_linear(x, weight, bias)
    y.backward(dy)
    flat, dy8 = x.detach().flatten(0, 1), rounded(dy.flatten(0, 1), E5M2)
    weight8 = rounded(weight.detach(), E4M3)
    assert_close(y.detach().flatten(0, 1).double(), rounded(flat, E4M3) @ weight8.t() + 1, 1e-5)
    assert_close(x.grad.flatten(0, 1).double(), dy8 @ weight8, 1e-5)
    assert_close(weight.grad.double(), dy8.t() @ rounded(flat, E4M3), 1e-5)
    assert_close(bias.grad, dy.sum((0, 1)), 1e-5)


def losses(layout: str, float8: bool, compiled: bool) -> tuple[list[float], int]:
    """Train. Returns the losses, and the number of operands that graphs of torch.compile round."""
    torch._dynamo.reset()
    config = make_config(f"{layout} full m2 bfloat16", model__float8=float8, training__compile=compiled)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with mock.patch("torch.compile", functools.partial(torch.compile, backend=backend)):
        found = train_steps(config, MODEL)["losses"]
    modules = [each for graph in graphs for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes]
    return found, sum(node.target in (torch.amax, "amax") for node in nodes)


def test_losses_decrease_as_in_bfloat16_and_are_those_of_compiled_products(pool: WorkerPool) -> None:
    """Compiled between the messages are the products of four matrices, three of two operands for each. The loss has one
    more amax.
    """
    (theirs, _), (ours, _) = (pool.run(losses, 2, "tp2 sp", float8, False)[0] for float8 in (False, True))
    (plain, none), (compiled, rounded) = (pool.run(losses, 1, "", True, compiled)[0] for compiled in (False, True))
    assert ours[0] - ours[-1] > 0.15  # tokens are random: there is little to learn
    assert_close(torch.tensor(ours), torch.tensor(theirs), 0.03)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > 1e-4  # float8 is on
    assert (none, rounded) == (0, 4 * 3 * 2 + 1)
    assert compiled == plain


@pytest.mark.parametrize(
    ("size", "layout", "message"),
    [
        (52, "", "intermediate_size / tp_size=52"),
        (64, "tp4", r"num_attention_heads \* head_dim / tp_size=8"),
        (64, "zb_h1 pp2", "pp_engine='zb_h1'"),
    ],
)
def test_layouts_that_float8_does_not_support_are_refused(size: int, layout: str, message: str) -> None:
    config = make_config(f"{layout} bfloat16", model__float8=True)
    with pytest.raises(UserError, match=message):
        check_layout(config, tiny_llama(intermediate_size=size))
