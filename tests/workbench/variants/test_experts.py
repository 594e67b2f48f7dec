"""Mixtures of experts: routers against transformers, files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from conformance.models import FAMILIES, WITH_EXPERTS, small_config
from picotron.console import UserError
from picotron.model.families import model_cost
from picotron.model.llama import Llama
from tests.support.checkpoints import Run, run_config
from tests.support.oracle import make_config, oracle_model, our_model
from workbench.pipelines.engine import check_layout
from workbench.run.checkpoint.expert_names import with_experts
from workbench.run.model_config import load_model_config


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_router_in_bfloat16_equals_transformers(family: str) -> None:
    """So do the dtypes of the weights, which Mixtral does not round."""
    config = small_config(family, hidden_size=64)
    theirs = AutoModelForCausalLM.from_config(config).bfloat16().model.layers[-1].mlp.gate
    ours = our_model(config, torch.bfloat16).model.layers["2"].mlp
    if family == "dots1":  # which stays in float32
        theirs.e_score_correction_bias = ours.gate.e_score_correction_bias.data
        assert theirs.e_score_correction_bias.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    ours.gate.weight.data = theirs.weight.data = torch.randn(theirs.weight.shape, generator=generator).bfloat16()
    tokens = torch.randn(50, 64, generator=generator).bfloat16()
    weights, chosen = ours.route(tokens)
    _, their_weights, their_chosen = theirs(tokens)
    assert weights.dtype == their_weights.dtype
    order, their_order = chosen.argsort(), their_chosen.argsort()
    assert torch.equal(chosen.gather(1, order), their_chosen.gather(1, their_order))
    assert torch.equal(weights.gather(1, order), their_weights.gather(1, their_order))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_flops_are_those_of_the_model(family: str) -> None:
    """Torch counts only matmuls, so the norms are subtracted, and no causal attention."""
    config = small_config(family, num_hidden_layers=2)
    model = our_model(config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == model_cost(config, 16).parameters
    with FlopCounterMode(display=False) as counter:
        model(
            torch.arange(2 * 16).view(2, 16), attention_fn=lambda q, k, v: q + 0 * (k.sum() + v.sum())
        ).sum().backward()
    norms = 6 * sum(parameter.numel() for parameter in trained if parameter.ndim == 1)
    attention = 12 * config.num_hidden_layers * model.model.layers["0"].self_attn.q_proj.out_features * 16
    assert counter.get_total_flops() / (2 * 16) == model_cost(config, 16).flops - norms - attention


@pytest.mark.parametrize(
    ("family", "keys", "layout", "sentence"),
    [
        ("mixtral", {"output_router_logits": True}, "", "output_router_logits=True"),
        ("mixtral", {"router_jitter_noise": 0.1}, "", "router_jitter_noise=0.1"),
        ("olmoe", {"clip_qkv": 5.0}, "", "clip_qkv=5.0"),
        ("olmoe", {"num_experts_per_tok": 9}, "", "num_experts_per_tok=9 .* exceeds the 8 experts"),
        ("olmoe", {}, "dp3 ep3", "cannot split the model's 8 experts per layer; use 1$"),
        ("dots1", {"n_group": 2, "topk_group": 1}, "", "n_group=2"),
        ("dots1", {"n_shared_experts": 0}, "", "needs n_shared_experts"),
        (
            "mixtral",
            {"routed_scaling_factor": 2.0},
            "",
            "routed_scaling_factor .* has no meaning for model_type='mixtral'",
        ),
        ("llama", {}, "dp2 ep2", "ep_size=2 cannot split the model's 0 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 13}, "tp2", "tp_size=2 does not divide 13"),
    ],
)
def test_models_that_cannot_run_are_refused(
    tmp_path: Path, family: str, keys: dict[str, Any], layout: str, sentence: str
) -> None:
    small_config(family, **keys).save_pretrained(tmp_path)
    config = make_config(layout, model__name=str(tmp_path))
    with pytest.raises(UserError, match=sentence):
        check_layout(config, load_model_config(config.model))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_transformers_loads_a_checkpoint(run: Run, tmp_path: Path, family: str) -> None:
    """Its config has the number of experts under all names."""
    config = small_config(family)
    found = run(run_config(tmp_path, "dp2 ep2", training__total_train_steps=4), config)
    folder = tmp_path / "step_00000004"
    assert with_experts(dict(Llama(config).named_parameters()), config) == found["weights"].keys()
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert json.loads((folder / "config.json").read_text()).keys() >= {"num_experts", "num_local_experts"}
    weights = model.state_dict()
    for name, weight in oracle_model(config, found["weights"]).state_dict().items():
        expected = weight.to(weights[name].dtype) if "gate." in name else weight  # since 5.24, float32 for some routers
        assert torch.equal(weights[name], expected), name
