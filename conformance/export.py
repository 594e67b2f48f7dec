"""Check of a model folder that a trainer has written: transformers loads it, with the right weights and settings."""

import dataclasses

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.case import Case
from conformance.compare import Difference, compare
from conformance.models import FAMILIES
from conformance.reference import Reference
from conformance.result import Result

SETTINGS = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
)
SETTINGS += " tie_word_embeddings rms_norm_eps head_dim max_position_embeddings rope_parameters hidden_act"
SETTINGS += " layer_types no_rope_layers attention_bias mlp_bias "
SETTINGS += " ".join(sorted({key for options in FAMILIES.values() for each in options for key in each}))


def read_weights(case: Case) -> tuple[Result, str]:
    """Read the weights of the model folder that a trainer has written, and say which of them are missing or unknown."""
    model, info = AutoModelForCausalLM.from_pretrained(
        case.output, dtype=torch.float64, output_loading_info=True, ignore_mismatched_sizes=True
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = "; ".join(f"{kind}: {sorted(info[kind])[0]}" for kind in kinds if info[kind])
    return Result(weights=dict(model.named_parameters())).local(), wrong


def check_export(case: Case, right: Reference) -> Difference | None:
    """Return the first difference between a trainer's model folder and the right weights and settings, or None."""
    if not (case.output / "config.json").exists():
        return Difference("model folder", case.last_step, hint="there is no config.json in the folder for outputs")
    written, expected = (AutoConfig.from_pretrained(folder) for folder in (case.output, case.model_folder))
    for name in SETTINGS.split():
        if (found := getattr(written, name, None)) != (value := getattr(expected, name, None)):
            return Difference("model folder", case.last_step, hint=f"{name} is {found!r}, not {value!r}")
    found, wrong = read_weights(case)
    if wrong:
        return Difference("model folder", case.last_step, hint=wrong)
    difference = compare([found], Reference(weights=right.weights), case.last_step)[1]
    return difference and dataclasses.replace(difference, what="model folder", ranks=())
