"""Config of the model: that of transformers, checked to be one that `Llama` computes as transformers does."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from pydantic import ConfigDict, Field, ValidationError, create_model
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from picotron.config import Model as ModelSection
from picotron.console import UserError
from picotron.model.families import FAMILIES, differences, head_size
from picotron.model.llama import ACTIVATIONS
from workbench.console import first_line, invalid_value
from workbench.files import read_object
from workbench.run.hub import connect

ROPE_FACTORS = {  # keys of rope_parameters that a rope_type needs, besides rope_theta
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


EXPERT_KEYS = [
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "first_k_dense_replace",
    "n_shared_experts",
    "routed_scaling_factor",
]


Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1, le=2**24)]
Token = Annotated[int, Field(ge=-1, le=2**40)]
LIMITS: dict[Any, str] = {
    Size: "vocab_size hidden_size intermediate_size num_attention_heads num_experts num_local_experts num_experts_per_tok "
    "moe_intermediate_size decoder_sparse_step no_rope_layer_interval",
    Size | None: "num_key_value_heads head_dim",
    Count: "first_k_dense_replace",
    Count | None: "sliding_window n_shared_experts",
    Token | None: "pad_token_id",
    Token | list[Token] | None: "eos_token_id",
    Annotated[float, Field(gt=0)]: "attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
    "routed_scaling_factor",
    Annotated[float, Field(ge=0, le=1e6)]: "rms_norm_eps initializer_range",
    Annotated[int, Field(ge=1, le=10_000)]: "num_hidden_layers",
    Annotated[int, Field(ge=1)]: "max_position_embeddings",
    Annotated[int, Field(ge=0, le=2**16)]: "num_labels",  # transformers makes a table of this size
    list[Count] | None: "mlp_only_layers",
    list[Literal[0, 1]] | None: "no_rope_layers",
    list[Literal["full_attention", "sliding_attention"]] | None: "layer_types",
}
FIELDS: dict[str, Any] = {name: (kind, None) for kind, names in LIMITS.items() for name in names.split()}
Limits = create_model(
    "Limits",
    __doc__="Limits of the keys of a config.json that `Llama` reads, where transformers checks types at most.",
    __config__=ConfigDict(strict=True, allow_inf_nan=False),
    **FIELDS,
)


def load_model_config(section: ModelSection) -> PreTrainedConfig:
    """Load the config of `model.name` (a folder or a hub id) and apply the section's overrides.

    Raises:
        UserError: the config cannot be read, is invalid, or needs features that `Llama` does not support.
    """
    name = section.name
    try:
        if os.path.isdir(name):  # False without permission, unlike `Path.is_dir`
            data = read_object(Path(name, "config.json"))
        else:
            connect(name)
            data, _ = PreTrainedConfig.get_config_dict(name)
        if not data:
            raise FileNotFoundError("file not found")
        if (ends := read_generation_config(name).get("eos_token_id")) is not None:
            data["eos_token_id"] = ends
    except Exception as error:  # no such folder, no network, no permission, not JSON, ...
        local = "use the folder of a model, a checkpoint or a run"
        if os.path.isfile(Path(name, "adapter_config.json")):
            local = "it has an adapter alone, which peft merges into its base model; save that, and use its folder"
        remedy = local if os.path.isdir(name) else "set model.name to a hub id or a local folder"
        raise UserError(f"{name!r} has no readable config.json ({first_line(error)}); {remedy}") from None
    family = data.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"model_type={family!r} of {name} is not supported; picotron trains {', '.join(FAMILIES)} models"
        )
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if getattr(section, key) is not None:
            data[key] = getattr(section, key)
    if section.num_hidden_layers is not None:  # the family's rule says which layers differ
        data = {key: value for key, value in data.items() if key not in ("layer_types", "no_rope_layers")}
    try:
        Limits.model_validate(data)
        config = CONFIG_MAPPING[family].from_dict(data)
        # As the model of transformers does: a length at the top level of the file counts only then.
        config.standardize_rope_params()
    except ValidationError as error:
        raise UserError(*(f"the config of {name}: {invalid_value(each)}" for each in error.errors())) from None
    except Exception as error:
        raise UserError(
            f"the config.json of {name} is not a valid {CONFIG_MAPPING[family].__name__}: {' '.join(str(error).split())}"
        ) from None
    check_supported(config)
    return config


def read_generation_config(name: str) -> dict[str, Any]:
    """Read the generation_config.json of a folder or a hub id; {} if there is none. As in transformers, its end tokens
    replace those of config.json.
    """
    path = Path(name, "generation_config.json")
    if not os.path.isdir(name):
        try:
            path = Path(hf_hub_download(name, path.name))
        except EntryNotFoundError:
            return {}
    return read_object(path) if path.exists() else {}


def end_tokens(config: PreTrainedConfig) -> list[int]:
    """List the tokens with which a model ends a text."""
    ends = config.eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def ends_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the tokens with which a tokenizer ends a text: the end-of-sequence token, and the special token that its
    chat template writes after an answer.
    """
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        text: Any = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # there is no template, or it refuses these messages; those of the data have their own errors
        return ends
    _, shown, rest = text.rpartition("ANSWER")
    after = tokenizer.encode(rest, add_special_tokens=False) if shown else []
    return ends + [token for token in after if token in tokenizer.added_tokens_decoder and token not in ends][:1]


def ends_of_both(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the tokens with which a model ends a text after it was trained with a tokenizer: those of the tokenizer, and
    those of the model, unless it came with another tokenizer: then its ends have other meanings here.
    """
    own = end_tokens(config)
    if tokenizer.eos_token_id not in own:
        own = [token for token in own if token in tokenizer.added_tokens_decoder]
    return sorted({*ends_of(tokenizer), *own})


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UserError if `config` needs a feature that `Llama` would compute differently from transformers."""
    parameters = config.rope_parameters
    if config.num_attention_heads % config.num_key_value_heads:
        divisors = [n for n in range(1, config.num_attention_heads + 1) if config.num_attention_heads % n == 0]
        raise UserError(
            f"num_key_value_heads={config.num_key_value_heads} does not divide num_attention_heads="
            f"{config.num_attention_heads}; use one of {divisors}"
        )
    if head_size(config) % 2:
        raise UserError(f"head_dim={head_size(config)} is odd; rotary embeddings need an even head_dim")
    if config.pad_token_id is not None and config.pad_token_id >= config.vocab_size:
        raise UserError(
            f"pad_token_id={config.pad_token_id} is not below vocab_size={config.vocab_size}; change one of them in the "
            f"model's config.json"
        )
    rotations = getattr(config, "no_rope_layers", None)
    if rotations is not None and len(rotations) < config.num_hidden_layers:
        raise UserError(
            f"no_rope_layers in the model's config.json has {len(rotations)} layers, not {config.num_hidden_layers}, "
            f"the num_hidden_layers; add the others, or remove the key"
        )
    foreign = [name for name in EXPERT_KEYS if name in vars(config) and not hasattr(type(config), name)]
    experts = differences(config).experts
    if experts and foreign:  # which `differences` would apply, and transformers ignores
        raise UserError(
            f"{foreign[0]} in the model's config.json has no meaning for model_type={config.model_type!r}; remove the key "
            f"in a copy of the model's folder"
        )
    if experts and experts.scale is not None and not experts.shared:
        raise UserError(
            f"model_type={config.model_type!r} needs n_shared_experts, at least 1, in the model's config.json; add the key"
        )
    if experts and experts.chosen > experts.number:
        raise UserError(
            f"num_experts_per_tok={experts.chosen} in the model's config.json exceeds the {experts.number} experts of a "
            f"layer; use at most {experts.number}"
        )
    features = {
        "hidden_act": (config.hidden_act, tuple(ACTIVATIONS)),
        "use_bidirectional_attention": (getattr(config, "use_bidirectional_attention", None), (None, False)),
        "attention_dropout": (config.attention_dropout, (0, None)),
        "rope_type": (parameters.get("rope_type"), ("default", "linear", "llama3")),
        "partial_rotary_factor": (parameters.get("partial_rotary_factor"), (1, None)),
        "quantization_config": (getattr(config, "quantization_config", None), (None,)),
        # Its auxiliary loss, a product of means over a batch, would depend on how the layout cuts the batch.
        "output_router_logits": (getattr(config, "output_router_logits", False), (False,)),
        "router_jitter_noise": (getattr(config, "router_jitter_noise", 0.0), (0.0,)),
        "n_group": (getattr(config, "n_group", 1), (1,)),
        "clip_qkv": (getattr(config, "clip_qkv", None), (None,)),
    }
    for name, (value, supported) in features.items():
        if value not in supported:
            allowed = " or ".join(repr(v) for v in supported)
            remedy = "To train without it, change the key in a copy of the model's folder"
            if name == "quantization_config":
                remedy = "Dequantise the model first, such as by transformers with dequantize=True, and save it"
            raise UserError(
                f"{name}={value!r} in the model's config.json is not supported; picotron supports {allowed}. {remedy}"
            )
    for name in ("rope_theta", *ROPE_FACTORS.get(parameters["rope_type"], ())):
        value = parameters.get(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UserError(f"{name}={value!r} in the model's rope_parameters should be a positive number")


def check_window(config: PreTrainedConfig, length: int, what: str) -> None:
    """Raise UserError if the model's sliding window would hide tokens of a sequence of `length` tokens.

    Args:
        what: name and length of the sequence, for the error.
    """
    window = differences(config).window
    if window is not None and length > window:
        raise UserError(
            f"{what} is longer than the model's sliding_window={window}, which picotron cannot apply; use at most "
            f"{window} tokens"
        )
