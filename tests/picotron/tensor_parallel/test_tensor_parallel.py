"""Layers of tensor parallelism: where they break a graph, their gradients in bfloat16, and sizes that are refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.model.llama import Llama, rope
from picotron.model.weights import materialise
from picotron.parallelize import unwrap
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from tests.support.oracle import assert_close, drawn_weights, make_config, oracle_model, our_model, tiny_llama
from tests.support.training import CPU, Loader, gathered, step_of, wrapped
from workbench.variants.float8 import CalledProjections

MODELS: dict[str, dict[str, Any]] = {
    "gqa, padded vocabulary": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "kv heads < tp": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "tied, biases, pad token": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, "pad_token_id": 40,
    },
}  # fmt: skip


def model_of(name: str) -> LlamaConfig:
    return tiny_llama(num_hidden_layers=2, **MODELS[name])


def parallel_model(config: LlamaConfig, sequence_parallel: bool, calls_layers: bool = False) -> Llama:
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(config).to(torch.float64), sequence_parallel)
    materialise(model, CPU, drawn_weights(config, 42))
    layers: Any = model.model.layers.values() if calls_layers else ()
    for block in (block for layer in layers for block in (layer.self_attn, layer.mlp)):
        block.project = CalledProjections(sequence_parallel)
    return model


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(config: LlamaConfig, tp: int, sequence_parallel: bool, calls_layers: bool) -> Tensor:
    setup_process_group_manager(tp, 1, 1, 1)
    model = parallel_model(config, sequence_parallel, calls_layers)
    ids, targets = batch()
    loss = model(ids, target_ids=targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([each.detach().flatten() for each in (loss, *gradients)])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize(("name", "tp"), [("tied, biases, pad token", 2), ("kv heads < tp", 4)])
def test_both_forms_of_a_block_are_equal(pool: WorkerPool, name: str, tp: int, sequence_parallel: bool) -> None:
    """The default one is compared with transformers in all layouts; float8 needs the other."""
    default, called = (
        pool.run(loss_and_gradients, tp, model_of(name), tp, sequence_parallel, calls) for calls in (False, True)
    )
    assert_close(torch.cat(called), torch.cat(default), 1e-12)


def graph_breaks(sequence_parallel: bool) -> list[str]:
    setup_process_group_manager(2, 1, 1, 1)
    model = parallel_model(model_of("gqa, padded vocabulary"), sequence_parallel)
    x = torch.zeros(2, 16 // (1 + sequence_parallel), model.config.hidden_size, dtype=torch.float64)
    tables = rope(model.frequencies, torch.arange(16)[None])
    explanation = torch._dynamo.explain(model.model.layers["0"])(x, *(table.double() for table in tables))
    return [str(reason.reason) for reason in explanation.break_reasons]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_compiled_layers_break_only_at_their_four_communications(pool: WorkerPool, sequence_parallel: bool) -> None:
    """Those in attention and MLP also break the layer, from which both are called."""
    reasons = pool.run(graph_breaks, 2, sequence_parallel)[0]
    assert len(reasons) == 6
    assert all("torch.compiler.disable" in reason for reason in reasons), reasons


def bfloat16_gradients(config: Config, model_config: LlamaConfig) -> dict[str, Tensor]:
    """Return the gradients of three equal micro-batches."""
    model, (ids, targets) = wrapped(config, model_config, torch.bfloat16), batch()
    inputs = {"input_ids": ids, "position_ids": torch.arange(16).expand(3, -1), "hidden_states": None}
    step_of(config, model_config, torch.bfloat16)(model, Loader([inputs | {"target_ids": targets}] * 3))
    model.finish_grad_sync()
    gradients = gathered(unwrap(model), "main_grad")
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    return gradients


@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"), [("tied, biases, pad token", 2, False), ("kv heads < tp", 4, True)]
)
def test_bfloat16_gradients_are_as_accurate_as_transformers(
    pool: WorkerPool, name: str, tp: int, sequence_parallel: bool
) -> None:
    """The reference is float64 with the same rounded weights; the bound is the error of transformers in bfloat16."""
    config = model_of(name)
    config.initializer_range, config.rms_norm_eps = 0.1, 1e-6
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    rounded = {name: w.to(torch.bfloat16).double() for name, w in our_model(config, seed=42).state_dict().items()}
    exact, half = (transformers_gradients(config, rounded, dtype) for dtype in (torch.float64, torch.bfloat16))
    keys = {"training__gradient_accumulation_steps": 3, "training__activation_checkpointing": "full"}
    run = make_config(tp_size=tp, sequence_parallel=sequence_parallel, **keys)
    ours = pool.run(bfloat16_gradients, tp, run, config)[0]
    assert ours.keys() == exact.keys()
    for key, true in exact.items():
        error, usual = ((gradients[key].double() - true).norm() / true.norm() for gradients in (ours, half))
        assert error < 2 * usual + 0.005, f"{key}: off by {error:.2%}, transformers in bfloat16 by {usual:.2%}"


def transformers_gradients(config: LlamaConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    model = oracle_model(config, weights, dtype)
    ids, targets = batch()
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), targets.flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
