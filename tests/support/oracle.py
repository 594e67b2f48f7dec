"""Reference for all comparisons: that of `conformance`, for picotron's configs, weights and data."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from conformance.adapters import picotron
from conformance.case import Case
from conformance.compare import relative_error
from conformance.experts import named_as
from conformance.models import EXACT_EXPERTS, with_exact_norms
from conformance.models import small_config as tiny_llama
from conformance.reference import adamw
from picotron.config import Config, Distributed, Training
from picotron.data.loader import TextRows
from picotron.model.families import differences
from picotron.model.llama import Llama
from picotron.model.placement import Index
from picotron.model.weights import ReadTensor, initial_weights, materialise
from workbench.run.config_reader import parse_config
from workbench.variants.experts import put_experts

__all__ = ["relative_error", "tiny_llama", "with_exact_norms"]
CPU = torch.device("cpu")


WORDS = {
    **dict.fromkeys(("selective", "full"), "training__activation_checkpointing"),
    **dict.fromkeys(("float32", "bfloat16", "float16"), "model__dtype"),
    "naive": "dp_engine",
}


def keys_of(layout: str) -> dict[str, Any]:
    """Return the keys of a config that a layout names, in words of `conformance` such as `dp2 pp2 zbv zero1` and in
    those of WORDS; `m4` stands for four micro-batches.
    """
    found, others = dict[str, Any](), []
    for word in layout.split():
        if word in WORDS:
            found[WORDS[word]] = word
        elif word[0] == "m" and word[1:].isdigit():
            found["training__gradient_accumulation_steps"] = int(word[1:])
        else:
            others.append(word)
    return picotron.keys_of(" ".join(others)) | found


def config_data(layout: str = "", **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the JSON of a float64 CPU config with the keys of a layout, see `keys_of`, and the given changes:
    `training__seq_length=16` sets training.seq_length, and keys without a section are those of `distributed`.
    """
    data: dict[str, dict[str, Any]] = {
        "distributed": {"use_cpu": True},
        "model": {"name": "template/tiny-llama", "dtype": "float64"},
        "training": {"seq_length": 16, "micro_batch_size": 2, "total_train_steps": 10, "learning_rate": 1e-2},
        "dataset": {"name": "python-stdlib"},
    }
    for key, value in (keys_of(layout) | changes).items():
        section, _, name = key.rpartition("__")
        data.setdefault(section or "distributed", {})[name] = value
    return data


def make_config(layout: str = "", **changes: Any) -> Config:
    return parse_config(config_data(layout, **changes))


def drawn_weights(config: PreTrainedConfig, seed: int) -> ReadTensor:
    """Return a reader of initial weights of which no bias is 0 and no norm is 1: that would hide mistakes."""
    initial = initial_weights(config, seed)

    def draw(name: str, shape: torch.Size, index: Index) -> Tensor:
        if len(shape) > 1:
            return initial(name, shape, index)
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
        return initial(name, shape, index) + (0.3 * torch.randn(shape, generator=generator))[index]

    return draw


def our_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0, **arguments: Any) -> Llama:
    with torch.device("meta"):
        model = Llama(config, **arguments).to(dtype)
        if differences(config).experts:
            put_experts(model, Distributed())
    materialise(model, CPU, drawn_weights(config, seed))
    return model


def oracle_model(config: PreTrainedConfig, weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """Return transformers' model, exact in float64, by default with the weights that a run begins with."""
    model = AutoModelForCausalLM.from_config(config, **EXACT_EXPERTS).double()
    weights = weights or our_model(config, seed=42).state_dict()
    theirs = named_as(weights, model.state_dict())
    assert theirs.keys() == weights.keys(), theirs.keys() ^ weights.keys()
    for name, tensor in theirs.items():
        assert tensor.shape == weights[name].shape, name
        tensor.copy_(weights[name])
    return with_exact_norms(model)


def case_of(training: Training) -> Case:
    """Return the hyperparameters of a training, whose learning rate decays with a cosine."""
    return Case(
        "", "", Path(), last_step=training.total_train_steps, total_steps=training.total_train_steps,
        learning_rate=training.learning_rate, warmup_steps=training.warmup_steps, min_lr_ratio=training.min_lr_ratio,
        weight_decay=training.weight_decay, beta1=training.adam_beta1, beta2=training.adam_beta2, eps=training.adam_eps,
        max_grad_norm=training.max_grad_norm,
    )  # fmt: skip


def torch_adamw(parameters: Iterable[nn.Parameter], training: Training) -> torch.optim.AdamW:
    """Return torch's optimizer of the parameters that are not frozen: matrices decay, others do not."""
    return adamw((p for p in parameters if p.requires_grad), case_of(training))


def random_tokens(vocab_size: int = 61) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=6000).astype(np.uint16)


def random_rows(config: Config, **arguments: int) -> TextRows:
    """Return rows of `random_tokens`."""
    return TextRows(random_tokens(**arguments), config.training.seq_length)


def assert_close(actual: Any, expected: Any, relative: float = 1e-9, what: str = "") -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{what}: {actual.keys() ^ expected.keys()}"
        for name, each in expected.items():
            assert_close(actual[name], each, relative, f"{what} {name}")
        return
    error = relative_error(actual, expected)
    assert error <= relative, f"{what}: off by {error:.3e}"
