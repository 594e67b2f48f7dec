"""docs/steps: every step trains like step 1, and step 1 like transformers."""

import functools
import importlib
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conformance.oracle import assert_close, with_exact_norms
from conformance.worker_pool import WorkerPool
from docs.steps import communication, llama

LAYOUTS = {
    "s2_tp": {"tp": 2},
    "s3_sp": {"tp": 2},
    "s4_dp": {"dp": 2, "tp": 2},
    "s5_buckets": {"dp": 2, "tp": 2},
    "s6_zero": {"dp": 2, "tp": 2},
    "s7_pp": {"dp": 1, "pp": 2, "tp": 2},
    "s8_1f1b": {"dp": 1, "pp": 4, "tp": 1},
    "s9_cp": {"dp": 1, "pp": 2, "cp": 2, "tp": 1},
}
Result = tuple[list[float], dict[str, Tensor]]


def train(step: str, sizes: dict[str, int]) -> Result:
    """Run a step on this rank. Returns the losses and this rank's weights."""
    with mock.patch.object(llama, "STEPS", 4):
        model, losses = importlib.import_module(f"docs.steps.{step}").train(**sizes)
    communication.group.clear()  # the threads of a group end with its last reference
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@functools.cache
def expected() -> Result:
    return train("s1_one_process", {})


@pytest.mark.parametrize("step", LAYOUTS)
def test_step_trains_like_one_process(pool: WorkerPool, step: str) -> None:
    """All ranks have the losses of step 1, and its weights or the shards of their index in the tp group."""
    (losses, weights), sizes = expected(), LAYOUTS[step]
    results, tp = pool.run(train, math.prod(sizes.values()), step, sizes), sizes["tp"]
    for rank, (rank_losses, rank_weights) in enumerate(results):
        assert_close(rank_losses, losses, what="losses")
        for name, weight in rank_weights.items():
            dim = next((d for d in range(weight.ndim) if weight.size(d) != weights[name].size(d)), None)
            shard = weights[name] if dim is None else weights[name].chunk(tp, dim)[rank % tp]
            assert_close(weight, shard, what=name)
            assert (dim is None) == (tp == 1 or "_proj" not in name)
    assert {name for _, held in results for name in held} == weights.keys()


def transformers_names(name: str) -> str:
    """Translate the name of a parameter, such as `1.q_proj.weight`."""
    index, rest = name.split(".", 1)
    ends = {0: "model.embed_tokens", llama.LAYERS + 1: "model.norm", llama.LAYERS + 2: "lm_head"}
    part = "self_attn." if rest[:2] in ("q_", "k_", "v_", "o_") else "mlp." if "_proj" in rest else ""
    return f"{ends[int(index)]}.{rest}" if int(index) in ends else f"model.layers.{int(index) - 1}.{part}{rest}"


def test_step_1_trains_like_transformers() -> None:
    config = LlamaConfig(
        vocab_size=len(llama.VOCABULARY), hidden_size=llama.HIDDEN, intermediate_size=llama.INTERMEDIATE,
        num_hidden_layers=llama.LAYERS, num_attention_heads=llama.HEADS, num_key_value_heads=llama.KV_HEADS,
        rms_norm_eps=1e-6, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(llama.DTYPE)
    initial = {transformers_names(name): weight for name, weight in llama.make_model().state_dict().items()}
    model.load_state_dict(initial, strict=True)
    model = with_exact_norms(model)
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    (step_1_losses, step_1_weights), losses = expected(), []
    for batch in llama.make_batches()[: len(step_1_losses)]:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_close(step_1_losses, losses, what="losses")
    for name, weight in step_1_weights.items():
        assert_close(weight, model.get_parameter(transformers_names(name)).detach(), what=name)
