"""Small models of each family, whose initial weights show every mistake, and transformers' model of a folder."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

IS_OLD = transformers.__version__.startswith("4.")
# Options that a family has besides a Llama's, chosen so that they show in the numbers. `python -m conformance` takes
# the first ones of a family; the fuzzer draws.
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "llama": [{}],
    "mistral": [{"sliding_window": 64}, {"sliding_window": None}],  # 64: the longest row
    "qwen2": [{"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, {}],
    "qwen3": [{"head_dim": 12}, {}],
    "smollm3": [{"no_rope_layer_interval": interval} for interval in (2, 1, 3)],
    # A norm of a block's output divides numbers near 0 by sqrt(eps): with 1e-6, changing the last bits of the weights
    # of a tiny model changes the gradient norm that transformers computes by up to 2e-10.
    "olmo2": [{"rms_norm_eps": 1e-3}],
    "granite": [
        dict(zip(MULTIPLIERS, factors, strict=True))
        for factors in ((0.2, 3.0, 0.5, 2.0), (0.25, 1.5, 1.0, 0.25), (1.0, 0.25, 1.5, 1.5))
    ],
    "gemma": [{"head_dim": 12}, {"head_dim": 4}],  # transformers' default is 256
    # Mixtures of experts. With 12 of them, some get no token of a small batch.
    "qwen3_moe": [
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "head_dim": 12,
        },
        {"num_experts": 12, "num_experts_per_tok": 1, "moe_intermediate_size": 12, "decoder_sparse_step": 2},
        {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 12, "mlp_only_layers": [0]},
    ],
    "mixtral": [{"num_local_experts": 6, "num_experts_per_tok": 2}, {"num_local_experts": 12, "sliding_window": 64}],
    "olmoe": [
        {"num_experts": 8, "num_experts_per_tok": 2},
        {"num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ],
    "dots1": [
        {
            "n_routed_experts": experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": 12,
            "n_shared_experts": shared,
            "first_k_dense_replace": dense,
            "norm_topk_prob": normalised,
            "routed_scaling_factor": scale,
            "head_dim": 12,
            "sliding_window": None,
        }
        for experts, chosen, shared, dense, normalised, scale in ((8, 3, 1, 1, True, 2.5), (12, 2, 2, 0, False, 1.0))
    ],
}
EXACT_EXPERTS = {} if IS_OLD else {"experts_implementation": "eager"}  # the default one needs bfloat16
WITH_EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "dots1")
BIAS = "e_score_correction_bias"  # of a router: a buffer in transformers


def small_config(family: str = "llama", **changes: Any) -> PretrainedConfig:
    """Return the config of a small model with grouped-query attention and untied embeddings.

    Args:
        changes: keys of config.json that replace the default ones.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # large, so that any mistake changes the loss
        "rms_norm_eps": 1e-3,  # neither this nor theta is a default value, which a trainer could have assumed
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    sizes |= FAMILIES.get(family, [{}])[0] | changes
    if family == "olmoe" and "head_dim" in sizes:  # its norms of heads have the hidden size
        sizes["hidden_size"] = sizes["num_attention_heads"] * sizes["head_dim"]
    if IS_OLD:
        sizes["rope_theta"] = sizes["rope_parameters"]["rope_theta"]
    return AutoConfig.for_model(family, **sizes)


@torch.no_grad()
def write_model(folder: Path, config: PretrainedConfig, seed: int = 0) -> None:
    """Write a model folder in float32. No bias is 0 and no norm is 1: that would hide mistakes. All weights are numbers
    in bfloat16, so that runs in any dtype start from the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    for parameter in (*model.parameters(), *biases(model).values()):
        if parameter.ndim >= 2:
            parameter.normal_(0, config.initializer_range, generator=generator)
        else:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load transformers' model from a folder, exact in float64, see `with_exact_norms`."""
    options = {"attn_implementation": "sdpa"}  # and not one that the folder names, for which code could be downloaded
    return with_exact_norms(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options, **EXACT_EXPERTS))


class ExactNorm(nn.Module):
    """A norm of transformers, in the dtype of its input. Those of Gemma multiply by 1 + weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.is_relative = norm.weight, type(norm).__name__.startswith("Gemma")
        self.eps = norm.eps if self.is_relative else norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.is_relative else self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)


def route(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts as the routers of transformers do, in the dtype of x: (..., D) -> logits (n, experts), and for the
    chosen ones the weights (n, k) and the numbers (n, k).
    """
    logits, bias = F.linear(x.flatten(0, -2), router.weight), getattr(router, BIAS, None)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    chosen = (scores if bias is None else scores + bias).topk(router.top_k).indices
    weights = scores.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's are always divided by their sum
        weights = weights / weights.sum(-1, keepdim=True)
    if torch.is_grad_enabled():
        router.tokens = getattr(router, "tokens", 0) + chosen.flatten().bincount(minlength=logits.size(1))
    return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen


def biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the biases of a model's routers by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)}


def move_biases(model: nn.Module, rate: float) -> None:
    """Move the biases of routers after a step, as Wang et al. 2024 (arXiv:2408.15664, algorithm 1) do, but for frozen
    routers.
    """
    for name, bias in biases(model).items():
        router: Any = model.get_submodule(name.rpartition(".")[0])
        tokens = router.tokens.tolist()
        error = [sum(tokens) / len(tokens) - each for each in tokens]
        bias += rate * router.weight.requires_grad * torch.tensor(error, dtype=bias.dtype).sign()
        router.tokens = 0


def with_exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Replace transformers' RMSNorm (of T5: LayerNorm), which computes in float32 for every dtype, with torch's, and
    what routers do in float32 with `route`. Give the scale of embeddings the dtype of the weights, which it
    has if a model is loaded in this dtype.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                setattr(parent, name, ExactNorm(child))
            elif (
                type(child).__name__.lower().endswith("topkrouter")
            ):  # not replaced: expert parallelism adds hooks to it
                child.forward = functools.partial(route, child)
            elif hasattr(child, "scalar_embed_scale"):
                child.embed_scale = torch.tensor(child.scalar_embed_scale, dtype=child.weight.dtype)
    return model
