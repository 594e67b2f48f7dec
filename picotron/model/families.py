"""Families of models: what each of them computes differently from Llama, in one table. No torch here."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts, MLPs of which a router chooses some for each token (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        number, chosen: numbers of the experts of a layer, and of those that a token passes through.
        size: intermediate size of an expert.
        normalised: whether the weights of a token's experts are divided by their sum.
        dense: layers that have an MLP nevertheless.
        shared: intermediate size of one more expert, through which all tokens pass; 0 for none.
        scale: None if scores are a softmax; else they are sigmoids, a bias of each expert is added to them for the
            choice only, and this factor multiplies the weights (DeepSeek-AI 2024, arXiv:2412.19437).
    """

    number: int
    chosen: int
    size: int
    normalised: bool
    dense: tuple[int, ...]
    shared: int
    scale: float | None


@dataclasses.dataclass(frozen=True)
class Differences:
    """The differences of a model from a Llama without biases.

    Attributes:
        qkv_bias: whether q_proj, k_proj and v_proj have a bias; o_bias and mlp_bias: the same of the other matrices.
        qk_norm: an RMSNorm of the queries and keys before they are rotated: of each head, or of all heads together.
        norm_offset: number that is added to the weights of norms, which are relative to it.
        norm_after: whether the outputs of attention and MLP are normalised, instead of their inputs.
        unrotated: layers without rotary positions (NoPE).
        window: number of positions, up to its own one, to which a token attends; None for all. Only sequences that are
            not longer are supported, see `check_window`.
        attention_multiplier: factor of the scores q k'; by default 1 / sqrt(d).
        embedding_multiplier, residual_multiplier: factors of the embedded tokens, and of what a block adds to x.
        logits_scaling: divisor of the logits.
        experts: the experts that workbench/variants puts in the place of MLPs, or None.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all heads"] | None = None
    norm_offset: float = 0.0
    norm_after: bool = False
    unrotated: tuple[int, ...] = ()
    window: int | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    experts: Experts | None = None


def _llama(config: Any) -> Differences:
    """Llama (arXiv:2302.13971, arXiv:2407.21783)."""
    return Differences(config.attention_bias, config.attention_bias, config.mlp_bias)


def _mistral(config: Any) -> Differences:
    """Mistral 7B (arXiv:2310.06825)."""
    return Differences(window=config.sliding_window or None)


def _qwen2(config: Any) -> Differences:
    """Qwen2 and Qwen2.5 (arXiv:2412.15115)."""
    return Differences(qkv_bias=True, window=_window(config))


def _qwen3(config: Any) -> Differences:
    """Qwen3 (arXiv:2505.09388)."""
    return Differences(config.attention_bias, config.attention_bias, qk_norm="head", window=_window(config))


def _olmoe(config: Any) -> Differences:
    """OLMoE (Muennighoff et al. 2024, arXiv:2409.02060), without its experts."""
    return dataclasses.replace(_olmo2(config), norm_after=False)


def _qwen3_moe(config: Any) -> Differences:
    """Qwen3's mixtures of experts (arXiv:2505.09388), without these."""
    return dataclasses.replace(_olmoe(config), qk_norm="head", window=config.sliding_window)


def _smollm3(config: Any) -> Differences:
    """SmolLM3: every fourth layer has no rotary positions (Yang et al. 2025, arXiv:2501.18795)."""
    unrotated = tuple(i for i, rotates in enumerate(config.no_rope_layers) if not rotates)
    return dataclasses.replace(_llama(config), unrotated=unrotated, window=_window(config))


def _olmo2(config: Any) -> Differences:
    """OLMo 2 (arXiv:2501.00656)."""
    return Differences(config.attention_bias, config.attention_bias, qk_norm="all heads", norm_after=True)


def _granite(config: Any) -> Differences:
    """Granite 3: multipliers as in the maximal update parametrisation (Yang et al. 2022, arXiv:2203.03466)."""
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    return dataclasses.replace(_llama(config), **{name: getattr(config, name) for name in names})


def _gemma(config: Any) -> Differences:
    """Gemma (arXiv:2403.08295)."""
    scale, bias = math.sqrt(config.hidden_size), config.attention_bias
    return Differences(qkv_bias=bias, o_bias=bias, norm_offset=1.0, embedding_multiplier=scale)


def _mixture(family: Callable[[Any], Differences]) -> Callable[[Any], Differences]:
    """Return a family with experts, from the same one without."""
    return lambda config: dataclasses.replace(family(config), experts=_experts(config))


FAMILIES: dict[str, Callable[[Any], Differences]] = {  # by the `model_type` of a config.json
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "granite": _granite,
    "gemma": _gemma,
    "qwen3_moe": _mixture(_qwen3_moe),
    "mixtral": _mixture(_mistral),  # Jiang et al. 2024, arXiv:2401.04088
    "olmoe": _mixture(_olmoe),
    "dots1": _mixture(_qwen3),  # Huo et al. 2025, arXiv:2506.05767
}


def differences(config: "PreTrainedConfig") -> Differences:
    """Return what a model computes differently from a Llama without biases."""
    return FAMILIES[config.model_type](config)


def head_size(config: "PreTrainedConfig") -> int:
    """Return the size d of an attention head. Not every family's config has a `head_dim`."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def architecture(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return all that determines what a model computes from its weights, except for its number of layers."""
    keys = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "hidden_act",
    )
    values = {key: getattr(config, key) for key in keys}
    return values | {"head_dim": head_size(config)} | dataclasses.asdict(differences(config))


def _window(config: Any) -> int | None:
    """Return the sliding window of a model of which some layers may have one. 0 means none."""
    return config.sliding_window or None if "sliding_attention" in config.layer_types else None


def _experts(config: Any) -> Experts:
    """Return the experts of a model. Not every family's config has all of these keys."""
    key = vars(config).get
    size = key("moe_intermediate_size", config.intermediate_size)
    without = key("mlp_only_layers", range(key("first_k_dense_replace", 0)))
    return Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        size,
        key("norm_topk_prob", True),
        tuple(i for i in range(config.num_hidden_layers) if i in without or (i + 1) % key("decoder_sparse_step", 1)),
        size * (key("n_shared_experts") or 0),
        key("routed_scaling_factor"),
    )


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """The cost of a part of a model. Costs compare by FLOPs first, and by parameters if the FLOPs are equal."""

    flops: int  # forward and backward, per token
    parameters: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.parameters + other.parameters)


def part_parameters(config: "PreTrainedConfig", tp_size: int = 1, active: bool = False) -> tuple[int, int, int]:
    """Number of parameters of a layer, of the embedding and of the head on one tp rank.

    Norms and the biases of row-parallel layers are replicated on the tp ranks. With fewer key/value heads than ranks,
    each rank holds one head. A vocabulary that tp_size does not divide is padded. If only some layers have experts, the
    layer is the mean of all.

    Args:
        active: whether to count only the experts that a token passes through.
    """
    D, F = config.hidden_size, config.intermediate_size // tp_size
    d, differs = head_size(config), differences(config)
    queries = config.num_attention_heads // tp_size * d
    kv = max(1, config.num_key_value_heads // tp_size) * d
    matrices, mlp = D * (2 * queries + 2 * kv), 3 * D * F
    if experts := differs.experts:
        used = experts.chosen if active else experts.number
        mixture = D * (3 * (used * experts.size + experts.shared) // tp_size + experts.number)
        mlp = mixture + (mlp - mixture) * len(experts.dense) // config.num_hidden_layers
    biases = (queries + 2 * kv) * differs.qkv_bias + D * differs.o_bias + (2 * F + D) * differs.mlp_bias
    norms = {None: 0, "head": 2 * d, "all heads": queries + kv}[differs.qk_norm] + 2 * D
    vocabulary = -(-config.vocab_size // tp_size) * D
    return matrices + mlp + biases + norms, vocabulary, vocabulary + D


def part_costs(config: "PreTrainedConfig", seq_length: int) -> tuple[Cost, Cost, Cost]:
    """The costs of a layer, of the embedding and of the head.

    A token takes 6 FLOPs, forward and backward, for each parameter that it is multiplied with, and 12 H d T for the
    attention scores and values of a layer, for sequences of T tokens (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B). Recomputed activations do not count.
    """
    layer, embedding, head = part_parameters(config)
    used, _, _ = part_parameters(config, active=True)
    attention = 12 * config.num_attention_heads * head_size(config) * seq_length
    return Cost(6 * used + attention, layer), Cost(0, embedding), Cost(6 * head, head)


def model_cost(config: "PreTrainedConfig", seq_length: int) -> Cost:
    """The cost of the full model. A tied matrix counts once among the parameters; as the head, it takes FLOPs, too."""
    layer, embedding, head = part_costs(config, seq_length)
    flops = config.num_hidden_layers * layer.flops + head.flops
    parameters = config.num_hidden_layers * layer.parameters + embedding.parameters + head.parameters
    return Cost(flops, parameters - bool(config.tie_word_embeddings) * embedding.parameters)
