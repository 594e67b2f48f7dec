"""Reference for all comparisons: a plain training loop on one process, with transformers' model and torch's AdamW."""

import hashlib
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from picotron.collectives import accumulation_dtype
from picotron.command_line import parse_config
from picotron.config import Config
from picotron.data.rows import TextRows
from picotron.model.llama import Llama
from picotron.model.weights import Index, ReadTensor, initial_weights, materialise

CPU = torch.device("cpu")


# What families can have besides a Llama's options, chosen so that it shows in the numbers.
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}


def tiny_llama(family: str = "llama", **changes: Any) -> PreTrainedConfig:
    """Return the config of a small model with odd sizes, grouped-query attention and untied embeddings."""
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # large, so that any mistake changes the loss
        "tie_word_embeddings": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    keys = sizes | FAMILY_OPTIONS[family] | changes
    return AutoConfig.for_model(family, **keys)


def make_config(**changes: Any) -> Config:
    """Return a float64 CPU config with the given changes: `training__seq_length=16` sets training.seq_length."""
    data: dict[str, dict[str, Any]] = {
        "distributed": {"use_cpu": True},
        "model": {"name": "template/tiny-llama", "dtype": "float64"},
        "training": {"seq_length": 16, "micro_batch_size": 2, "total_train_steps": 10, "learning_rate": 1e-2},
        "dataset": {"name": "python-stdlib"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data.setdefault(section, {})[name] = value
    return parse_config(data)


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
    materialise(model, torch.device("cpu"), drawn_weights(config, seed))
    return model


def oracle_model(
    config: PreTrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype = torch.float64, device: torch.device = CPU
) -> PreTrainedModel:
    """Return transformers' model with these weights, exact in float64."""
    with device:  # the rotary frequencies, too, are computed there: in float32, devices round differently
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.load_state_dict(weights, strict=True)
    return with_exact_norms(model)


def with_exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Replace transformers' RMSNorm (of T5: LayerNorm), which computes in float32 for every dtype, with torch's."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def random_tokens(count: int = 6000, vocab_size: int = 61) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=count).astype(np.uint16)


def random_rows(config: Config, **arguments: int) -> TextRows:
    """Return rows of `random_tokens`."""
    return TextRows(random_tokens(**arguments), config.training.seq_length)


def oracle_training(
    config: Config,
    model_config: PreTrainedConfig,
    tokens: np.ndarray,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Train on one process, without shuffling the data.

    Args:
        dtype: dtype of the computation; in bfloat16, weights and gradients are in float32, with autocast.

    Returns:
        The losses, the gradient norms, the gradients of the first step and the final weights, all on the CPU.
    """
    training, batch = config.training, config.global_batch_size
    wide = accumulation_dtype(torch.empty(0, dtype=dtype))
    model = oracle_model(model_config, our_model(model_config, wide, training.seed).state_dict(), wide, device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
    )
    warmup, total = training.warmup_steps, training.total_train_steps
    rise = LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=max(1, warmup))
    fall = CosineAnnealingLR(optimizer, total - warmup, training.learning_rate * training.min_lr_ratio)
    scheduler = SequentialLR(optimizer, [rise, fall], [warmup]) if warmup else fall

    length = training.seq_length
    windows = torch.stack([
        torch.from_numpy(tokens[i : i + length + 1].astype(np.int64)) for i in range(0, len(tokens) - length, length)
    ])  # fmt: skip
    losses, norms, gradients = [], [], {}
    for step in range(total):
        rows = windows[step * batch : (step + 1) * batch].to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != wide):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).to(wide), rows[:, 1:].flatten())
        loss.backward()
        gradients = gradients or {name: p.grad.cpu().clone() for name, p in model.named_parameters()}
        limit = float("inf") if training.max_grad_norm is None else training.max_grad_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {"losses": losses, "grad_norms": norms, "gradients": gradients, "weights": weights}


def assert_equals_training(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that a rank's training result, gathered for the full model, equals that of `oracle_training`."""
    assert result.keys() == expected.keys()
    assert_close(result["losses"], expected["losses"], what="losses")
    assert_close(result["grad_norms"], expected["grad_norms"], what="grad norms")
    for kind in ("gradients", "weights"):
        assert result[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert_close(result[kind][name], tensor, what=f"{kind} of {name}")


def relative_error(actual: Any, expected: Any) -> float:
    """Return the largest |actual - expected| divided by the largest |expected|, or infinity if that is not finite."""
    actual, expected = (torch.as_tensor(each, dtype=torch.float64) for each in (actual, expected))
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    if error == 0.0:
        return 0.0
    return error / scale if math.isfinite(error) and scale else math.inf


def assert_close(actual: Any, expected: Any, relative: float = 1e-9, what: str = "") -> None:
    error = relative_error(actual, expected)
    assert error <= relative, f"{what}: off by {error:.3e}"
