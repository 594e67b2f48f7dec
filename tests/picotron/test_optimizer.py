"""The optimizer: float32 master weights, and parameters of two dtypes."""

import pytest
import torch
from torch import nn

from picotron.config import Training
from picotron.data_parallel.data_parallel import DataParallelNaive
from picotron.model.placement import main_grad
from picotron.optimizer import AdamW
from tests.support.oracle import assert_close, make_config

pytestmark = pytest.mark.usefixtures("_one_rank")


def training(**changes: object) -> Training:
    return make_config(**{f"training__{key}": value for key, value in changes.items()}).training


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_weights_have_float32_master_weights(fused: bool) -> None:
    """Updates too small for bfloat16 accumulate in the master weight, as they do in a float32 model: also if a new
    optimizer loads the state of the first one, and if one number of a weight is changed by hand.
    """
    config = training(learning_rate=1e-4, weight_decay=0.0)
    start, gradients = torch.full((4, 4), 1.0), torch.linspace(0.5, 1.5, 16).view(4, 4)
    models = [nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for model in models:
        model.weight.data.copy_(start)
        optimizer = AdamW(DataParallelNaive(model), config, fused)
        main_grad(model.weight).copy_(gradients)
        for step in range(50):
            if step == 20:
                state, optimizer = optimizer.state_dict(), AdamW(optimizer.model, config, fused)
                optimizer.load_state_dict(state)
            if step == 30:
                with torch.no_grad():
                    model.weight[3, 3] = 2.0
            optimizer.step()
        assert torch.equal(main_grad(model.weight), gradients)
        assert model.weight.grad is None
    half, full = (model.weight for model in models)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, full.to(torch.bfloat16))
    assert half[0, 0] < 1.0  # 1 - 1e-4 is 1 in bfloat16, but 1 - 50e-4 is not


def test_moments_of_bfloat16_weights_are_those_of_torch_in_float32() -> None:
    config, model = training(learning_rate=1e-2, weight_decay=0.0), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    gradients, theirs = torch.linspace(0.5, 1.5, 16).view(4, 4), nn.Parameter(model.weight.detach().float())
    betas = config.adam_beta1, config.adam_beta2
    reference = torch.optim.AdamW([theirs], config.learning_rate, betas, config.adam_eps, weight_decay=0.0)
    optimizer, start = AdamW(DataParallelNaive(model), config, fused=False), theirs.detach().clone()
    for step in range(5):
        main_grad(model.weight).copy_(gradients := gradients.roll(1, 0) * (1 + step))
        theirs.grad = gradients
        optimizer.step()
        reference.step()
    assert_close(optimizer.masters[model.weight] - start, theirs.detach() - start, 1e-4)


def test_parameters_of_two_dtypes_are_updated() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)])
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = AdamW(DataParallelNaive(model), training(), fused=False)
    for parameter in model.parameters():
        main_grad(parameter).fill_(1)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert (parameter < old).all()
