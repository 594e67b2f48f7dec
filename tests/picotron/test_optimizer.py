"""The optimizer: float32 master weights, and parameters of two dtypes."""

import copy

import pytest
import torch
from torch import nn

from picotron.data_parallel.data_parallel import DataParallelNaive
from picotron.model.placement import main_grad
from picotron.optimizer import AdamW, clip_grad_norm, make_scheduler
from tests.support.oracle import assert_close, make_config, torch_adamw
from workbench.variants.choose import make_optimizer


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_weights_have_float32_master_weights(fused: bool) -> None:
    """Updates too small for bfloat16 accumulate in the master weight, as they do in torch's optimizer in float64, and
    in a float32 weight of the same model: also if a new optimizer loads the state of the first one, and if numbers of
    a weight are changed by hand, or its data replaced.
    """
    config = make_config(training__learning_rate=1e-4, training__weight_decay=0.0).training
    model = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    half, full = model.parameters()
    exact = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    for weight in (half, full):
        weight.data.fill_(1.0)
    optimizer, reference = AdamW(DataParallelNaive(model), config, fused), torch_adamw([exact], config)
    for step in range(50):
        gradients = torch.linspace(0.5, 1.5, 16).view(4, 4).roll(step, 0) * (1 + step % 3)
        exact.grad = gradients.double()
        for weight in (half, full):
            main_grad(weight).copy_(gradients)
        if step == 30:
            with torch.no_grad():
                half[3, 3] = full[3, 3] = exact[3, 3] = 1 + 2**-7
        if step in (20, 30):
            state, optimizer = optimizer.state_dict(), AdamW(optimizer.model, config, fused)
            optimizer.load_state_dict(state)
        if step == 40:
            for weight in (half, full, exact):
                weight.data = weight.detach().index_fill(0, torch.tensor([2]), 1.0)
        optimizer.step()
        reference.step()
    for weight in (half, full):
        assert_close(optimizer.masters[weight].double() - 1, exact.detach() - 1, 1e-4)
        assert torch.equal(main_grad(weight), gradients)
        assert weight.grad is None
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.bfloat16())
    assert half[0, 0] < 1.0  # 1 - 1e-4 is 1 in bfloat16, but 1 - 50e-4 is not


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("states", ["float32", "bfloat16_moments", "bfloat16"])
def test_a_weight_in_no_group_is_not_updated(states: str) -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = make_optimizer(DataParallelNaive(layer), make_config("bfloat16", training__optimizer_states=states))
    del optimizer.param_groups[1]
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
        main_grad(parameter).fill_(1.0)
    optimizer.step()
    assert [parameter.any() for parameter in layer.parameters()] == [True, False]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("states", ["bfloat16_moments", "bfloat16"])
def test_an_optimizer_goes_on_with_the_bfloat16_states_of_another_one(states: str) -> None:
    config = make_config("bfloat16", training__optimizer_states=states, training__lr_scheduler="linear")
    ends = []
    for loads in (False, True):
        layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        nn.init.constant_(layer.weight, 1.0)
        optimizer = make_optimizer(DataParallelNaive(layer), config)
        scheduler = make_scheduler(optimizer, config.training)
        for step in range(6):
            main_grad(layer.weight).copy_(torch.linspace(0.5, 1.5, 16).view(4, 4).roll(step, 0) * (1 + step))
            optimizer.step()
            scheduler.step()
            if loads:
                state, optimizer = optimizer.state_dict(), make_optimizer(optimizer.model, config)
                optimizer.load_state_dict(copy.deepcopy(state))
                scheduler = make_scheduler(optimizer, config.training, step + 1)
        ends.append(layer.weight)
    assert torch.equal(*ends)


@pytest.mark.usefixtures("_one_rank")
def test_the_norm_of_a_large_gradient_is_exact() -> None:
    model = DataParallelNaive(nn.Linear(2**12, 2**12, bias=False))
    gradient = main_grad(model.module.weight).normal_()
    assert_close(clip_grad_norm(model, None).double(), gradient.double().norm(), 1e-5)


@pytest.mark.usefixtures("_one_rank")
def test_the_norm_is_computed_where_the_gradients_are() -> None:
    """As on a GPU with `distributed.backend=gloo`."""
    model = DataParallelNaive(nn.Linear(2, 2, device="meta"))
    assert clip_grad_norm(model, 1.0).device == main_grad(model.module.weight).device
