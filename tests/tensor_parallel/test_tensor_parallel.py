"""Tensor parallelism: loss, gradients and ten optimizer steps equal those of transformers on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from conformance.oracle import (
    assert_close,
    assert_equals_training,
    drawn_weights,
    make_config,
    oracle_model,
    oracle_training,
    our_model,
    random_tokens,
    tiny_llama,
)
from conformance.training import CPU, gathered, train
from conformance.worker_pool import WorkerPool
from picotron.checkpoint.safetensors_folder import SafetensorsFolder
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.llama import Llama, rope
from picotron.model.weights import materialise
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel

MODELS: dict[str, dict[str, Any]] = {
    "gqa, padded vocabulary": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "kv heads < tp": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "tied, biases, pad token": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, "pad_token_id": 40,
    },
    "vocabulary that divides": {"vocab_size": 64, "num_key_value_heads": 4},
    "tied, explicit head_dim": {"tie_word_embeddings": True, "head_dim": 6},
    "qwen3": {"family": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2},
    "olmo2": {"family": "olmo2", "num_attention_heads": 8, "num_key_value_heads": 2},
}  # fmt: skip


def model_of(name: str) -> LlamaConfig:
    return tiny_llama(num_hidden_layers=2, **MODELS[name])


def parallel_model(config: LlamaConfig, sequence_parallel: bool, **arguments: Any) -> Llama:
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(config, **arguments).to(torch.float64), sequence_parallel)
    materialise(model, CPU, drawn_weights(config, 42))
    return model


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(config: LlamaConfig, tp: int, sequence_parallel: bool, checkpointed: bool) -> dict[str, Any]:
    setup_process_group_manager(tp, 1, 1, 1)
    model = parallel_model(config, sequence_parallel, checkpoint_activations=checkpointed)
    wrapped = DataParallelBucket(model)
    ids, targets = batch()
    with torch.no_grad():
        logits = model(ids)
    loss = wrapped(ids, target_ids=targets)
    loss.backward()
    wrapped.finish_grad_sync()
    return {"logits": logits, "loss": loss.detach(), "gradients": gathered(model, "main_grad")}


# `make test` runs each layout either with or without activation checkpointing, and `make slow` the other half.
LAYOUTS = [
    pytest.param(tp, sp, checkpointed, marks=[] if checkpointed == (tp == 4) else pytest.mark.slow)
    for tp, sp in ((1, True), (2, False), (2, True), (4, False), (4, True))
    for checkpointed in (False, True)
]


@pytest.mark.parametrize(("tp", "sequence_parallel", "checkpointed"), LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients_equal_transformers(
    pool: WorkerPool, name: str, tp: int, sequence_parallel: bool, checkpointed: bool
) -> None:
    config = model_of(name)
    theirs = oracle_model(config, our_model(config, seed=42).state_dict())
    ids, targets = batch()
    logits = theirs(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    for result in pool.run(loss_and_gradients, tp, config, tp, sequence_parallel, checkpointed):
        assert_close(result["logits"], logits.detach(), what="logits")
        assert_close(result["loss"], loss.detach(), what="loss")
        assert result["gradients"].keys() == dict(theirs.named_parameters()).keys()
        for key, parameter in theirs.named_parameters():
            assert_close(result["gradients"][key], parameter.grad, what=key)


def compiled_gradients(sequence_parallel: bool) -> dict[str, Tensor]:
    setup_process_group_manager(2, 1, 1, 1)
    model = parallel_model(model_of("kv heads < tp"), sequence_parallel)
    for layer in model.model.layers.values():
        layer.compile(backend="aot_eager")
    ids, targets = batch()
    wrapped = DataParallelBucket(model)
    wrapped(ids, target_ids=targets).backward()
    wrapped.finish_grad_sync()
    return gathered(model, "main_grad")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients(pool: WorkerPool, sequence_parallel: bool) -> None:
    expected = pool.run(loss_and_gradients, 1, model_of("kv heads < tp"), 1, False, False)[0]["gradients"]
    for name, gradient in pool.run(compiled_gradients, 2, sequence_parallel)[0].items():
        assert_close(gradient, expected[name], what=name)


def graph_breaks(sequence_parallel: bool) -> list[str]:
    setup_process_group_manager(2, 1, 1, 1)
    model = parallel_model(model_of("gqa, padded vocabulary"), sequence_parallel)
    x = torch.zeros(2, 16 // (1 + sequence_parallel), model.config.hidden_size, dtype=torch.float64)
    tables = rope(model.config, torch.arange(16)[None])
    explanation = torch._dynamo.explain(model.model.layers["0"])(x, *(table.double() for table in tables))
    return [str(reason.reason) for reason in explanation.break_reasons]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_compiled_layers_break_only_at_their_four_communications(pool: WorkerPool, sequence_parallel: bool) -> None:
    """Those in attention and MLP also break the layer, from which both are called."""
    reasons = pool.run(graph_breaks, 2, sequence_parallel)[0]
    assert len(reasons) == 6
    assert all("torch.compiler.disable" in reason for reason in reasons), reasons


def gradient_through_gathered_logits(config: LlamaConfig, tp: int) -> dict[str, Tensor]:
    setup_process_group_manager(tp, 1, 1, 1)
    model = parallel_model(config, False)
    wrapped = DataParallelBucket(model)
    ids, targets = batch()
    F.cross_entropy(wrapped(ids).flatten(0, 1), targets.flatten()).backward()
    wrapped.finish_grad_sync()
    return gathered(model, "main_grad")


def test_loss_of_gathered_logits_has_the_same_gradients(pool: WorkerPool) -> None:
    config = model_of("gqa, padded vocabulary")
    expected = pool.run(loss_and_gradients, 1, config, 1, False, False)[0]["gradients"]
    for name, gradient in pool.run(gradient_through_gathered_logits, 2, config, 2)[0].items():
        assert_close(gradient, expected[name], what=name)


# Every model with every tp size; combined with data parallelism, every model on 4 ranks and the first model on 8.
# `make test` runs each model with tp 4 and sequence parallelism.
TEN_STEPS = [
    pytest.param(name, tp, dp, sp, marks=[] if (tp, dp, sp) == (4, 1, True) else pytest.mark.slow)
    for name in MODELS
    for tp, dp in ((2, 1), (4, 1), (2, 2))
    for sp in (False, True)
]
TEN_STEPS += [pytest.param(next(iter(MODELS)), 4, 2, sp) for sp in (False, True)]


@pytest.mark.parametrize(("name", "tp", "dp", "sequence_parallel"), TEN_STEPS)
def test_ten_steps_equal_one_process(pool: WorkerPool, name: str, tp: int, dp: int, sequence_parallel: bool) -> None:
    config = make_config(
        distributed__tp_size=tp,
        distributed__dp_size=dp,
        distributed__sequence_parallel=sequence_parallel,
        training__gradient_accumulation_steps=2 if tp == 2 else 1,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
        dataset__shuffle=False,
    )
    expected = oracle_training(config, model_of(name), random_tokens())
    for result in pool.run(train, tp * dp, config, model_of(name)):
        assert_equals_training(result, expected)


def bfloat16_gradients(config: LlamaConfig, tp: int, sequence_parallel: bool, checkpointed: bool) -> dict[str, Tensor]:
    setup_process_group_manager(tp, 1, 1, 1)
    with torch.device("meta"):
        model = Llama(config, checkpoint_activations=checkpointed).to(torch.bfloat16)
        model = apply_tensor_parallel(model, sequence_parallel)
    materialise(model, CPU, drawn_weights(config, 42))
    wrapped = DataParallelBucket(model)
    ids, targets = batch()
    for i in range(3):
        wrapped.require_backward_grad_sync = i == 2
        (wrapped(ids, target_ids=targets) / 3).backward()
    wrapped.finish_grad_sync()
    gradients = gathered(model, "main_grad")
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    return gradients


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "checkpointed"), [(1, False, True), (2, False, True), (2, True, False), (4, True, True)]
)
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_gradients_are_as_accurate_as_transformers(
    pool: WorkerPool, name: str, tp: int, sequence_parallel: bool, checkpointed: bool
) -> None:
    """The reference is float64 with the same rounded weights; the bound is the error of transformers in bfloat16."""
    config = model_of(name)
    config.initializer_range = 0.1
    rounded = {name: w.to(torch.bfloat16).double() for name, w in our_model(config, seed=42).state_dict().items()}
    exact, half = (
        transformers_gradients(config, rounded, torch.float64),
        transformers_gradients(config, rounded, torch.bfloat16),
    )
    ours = pool.run(bfloat16_gradients, tp, config, tp, sequence_parallel, checkpointed)[0]
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


def weights_from_folder(folder: str, config: LlamaConfig, tp: int) -> dict[str, Tensor]:
    setup_process_group_manager(tp, 1, 1, 1)
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(config))
    materialise(model, CPU, SafetensorsFolder(Path(folder)).read)
    return gathered(model, "data")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_reads_its_shard_of_pretrained_weights(pool: WorkerPool, tmp_path: Path, name: str, tp: int) -> None:
    theirs = AutoModelForCausalLM.from_config(model_of(name))
    theirs.save_pretrained(tmp_path)
    for weights in pool.run(weights_from_folder, tp, str(tmp_path), model_of(name), tp):
        assert weights.keys() == dict(theirs.named_parameters()).keys()
        for key, parameter in theirs.named_parameters():
            assert torch.equal(weights[key], parameter), key


@pytest.mark.parametrize(
    ("changes", "tp", "sizes"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 3, r"\[1, 2, 4\]"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 16, r"\[1, 2, 4\]"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "hidden_size": 36}, 4, r"\[1, 2\]"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 51}, 2, r"\[1\]"),
    ],
)
def test_check_tensor_parallel_rejects_indivisible_sizes(changes: dict[str, Any], tp: int, sizes: str) -> None:
    with pytest.raises(UserError, match=f"tp_size={tp} does not split num_attention_heads=.*; use one of {sizes}"):
        check_tensor_parallel(tiny_llama(**changes), tp)


def test_sequence_parallel_rejects_an_indivisible_seq_length() -> None:
    with pytest.raises(
        UserError,
        match=r"training.seq_length=50 is not divisible by 4, as sequence_parallel with tp_size=4 requires; use 48 or 52",
    ):
        make_config(training__seq_length=50, distributed__tp_size=4, distributed__sequence_parallel=True)
