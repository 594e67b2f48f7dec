"""Layers of tensor parallelism: where they break a graph, and both forms of a block. (Their rounding in bfloat16 is in
test_conformance.)
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.model.llama import Llama, rope
from picotron.model.weights import materialise
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from tests.support.oracle import assert_close, drawn_weights, tiny_llama
from tests.support.training import CPU
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
