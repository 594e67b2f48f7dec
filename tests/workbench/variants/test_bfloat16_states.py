"""AdamW with bfloat16 states: torch's AdamW up to rounding, which is the same in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.data_parallel.data_parallel import DataParallelNaive
from picotron.model.placement import Index, main_grad
from picotron.model.weights import copy_part
from picotron.parallelize import unwrap
from tests.support.checkpoints import Run, first_half, run_config
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import all_stages, wrapped
from workbench.variants.bfloat16_states import BFloat16AdamW, random_bits, round_stochastically
from workbench.variants.choose import make_optimizer

STATES = ["bfloat16_moments", "bfloat16"]


def config_of(states: str, layout: str = "", **changes: Any) -> Config:
    return make_config(f"{layout} bfloat16", training__optimizer_states=states, **changes)


def bits_of(count: int, update: int = 1) -> Tensor:
    return random_bits(torch.arange(count, dtype=torch.int32), torch.tensor([update, 7 * update], dtype=torch.int32))


def test_random_bits_differ_and_special_numbers_stay() -> None:
    n, rounded = 2**20, torch.empty(6, dtype=torch.bfloat16)
    assert (bits_of(n, 1) - bits_of(n, 2)).unique().numel() > n // 2  # other bits for each update
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    special = torch.cat([special, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])  # a GPU's NaN
    round_stochastically(rounded, special, torch.full((6,), 0xFFFF, dtype=torch.int32))
    assert str(rounded.tolist()) == "[inf, -inf, nan, 0.0, -0.0, nan]"


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("states", STATES)
def test_updates_are_those_of_torch_on_average(states: str, beta2: float) -> None:
    """4,096 equal elements with equal gradients, which fall to a tenth: their mean follows a float32 AdamW."""
    config = config_of(states, training__adam_beta2=beta2, training__learning_rate=1e-4, training__weight_decay=0.1)
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 0.5)
    theirs = nn.Parameter(torch.full((1,), 0.5))
    training = config.training
    reference = torch.optim.AdamW([theirs], 1e-4, (training.adam_beta1, beta2), training.adam_eps, weight_decay=0.1)
    optimizer = make_optimizer(DataParallelNaive(model), config)
    assert isinstance(optimizer, BFloat16AdamW)
    for step in range(60):
        gradient = 1.0 if step < 20 else 0.1
        main_grad(model.weight).fill_(gradient)
        theirs.grad = torch.full((1,), gradient)
        optimizer.step()
        reference.step()
    state, expected = optimizer.state_of(model.weight), reference.state[theirs]
    assert {name: each.dtype for name, each in state.items() if name != "master"} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    assert abs(state["exp_avg_sq"].double().mean() / expected["exp_avg_sq"].item() - 1) < 2e-3
    weights, tolerance = (state["master"], 5e-3) if "master" in state else (model.weight, 0.05)
    assert abs((0.5 - weights.double().mean()) / (0.5 - theirs.item()) - 1) < tolerance


def weights_after_updates(config: Config) -> dict[str, Tensor]:
    """Update a model five times with gradients that depend on names alone. Returns the full weights."""
    model_config = tiny_llama(num_key_value_heads=1, tie_word_embeddings=True)
    model = wrapped(config, model_config)
    llama, optimizer = unwrap(model), make_optimizer(model, config)

    def gradient(name: str, shape: torch.Size, index: Index) -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return torch.randn(shape, generator=generator)[index]

    model.finish_grad_sync()  # the gradients below are averages
    for _ in range(5):
        for name, parameter in llama.named_parameters():
            copy_part(main_grad(parameter), parameter, name, gradient)
        optimizer.step()
    return all_stages(llama, "data")


LAYOUTS = [
    "dp3 zero3",
    "pp2",  # whose two ranks hold the tied matrix
    "cp2 tp2 zero1 sp",  # both tp ranks hold the kv head
]


@pytest.mark.parametrize("states", STATES)
def test_every_layout_rounds_alike(pool: WorkerPool, states: str) -> None:
    (expected,) = pool.run(weights_after_updates, 1, config_of(states))
    for layout in LAYOUTS:
        config = config_of(states, layout)
        found = pool.run(weights_after_updates, config.distributed.world_size, config)[0]
        assert all(found[name].equal(each) for name, each in expected.items()), layout


def test_a_run_resumes_in_another_layout(run: Run, tmp_path: Path) -> None:
    """With the same states, the run goes on as if it had not stopped; states of the other kind are converted."""

    def keys(states: str) -> dict[str, Any]:
        return {"training__max_grad_norm": None, "training__optimizer_states": states}

    whole = run(run_config(tmp_path / "whole", "dp2 zero3 bfloat16", **keys("bfloat16")))
    for first in ("float32", "bfloat16"):
        run(first_half(tmp_path / first, "dp2 zero1 bfloat16", **keys(first)))
    for first, second in (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")):
        load_path = str(tmp_path / first / "step_00000005")
        resumed = run_config(
            tmp_path / f"{first} {second}", "dp2 zero3 bfloat16", checkpoint__load_path=load_path, **keys(second)
        )
        halves = run(resumed)
        assert halves["losses"] == pytest.approx(whole["losses"][5:], rel=0 if first == second else 0.01, abs=0)
        if first == second:
            assert all(torch.equal(halves["weights"][name], each) for name, each in whole["weights"].items())
