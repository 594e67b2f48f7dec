"""Combinations of the values of config keys, and a folder name for each combination. No torch here."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from picotron.config import default_of
from picotron.console import UserError
from workbench.run.config_reader import RawConfig, leaf_keys

AXES = {axis: f"distributed.{axis}_size" for axis in ("dp", "pp", "cp", "tp")}
GLOBAL_BATCH = "global_batch_size"  # not a key of the config: it determines gradient_accumulation_steps
# Short flags of some keys. Folder names use them, in this order; all other keys follow.
FLAGS = AXES | {
    "ep": "distributed.ep_size",
    "pp_engine": "distributed.pp_engine",
    "mbs": "training.micro_batch_size",
    "grad_acc_steps": "training.gradient_accumulation_steps",
    GLOBAL_BATCH: GLOBAL_BATCH,
    "seq_len": "training.seq_length",
    "model_name": "model.name",
    "num_hidden_layers": "model.num_hidden_layers",
    "num_attention_heads": "model.num_attention_heads",
    "num_key_value_heads": "model.num_key_value_heads",
    "subset_name": "dataset.subset_name",
    "use_wandb": "logging.use_wandb",
    "use_cpu": "distributed.use_cpu",
    "use_fused_adam": "model.use_fused_adam",
}
BRIEF = {  # parts of brief names, with the value as {}
    "distributed.dp_engine": "{}",
    "distributed.pp_engine": "{}",
    "schedule.pp_chunks": "chunks{}",
    "distributed.sequence_parallel": "sp",
    "training.activation_checkpointing": "{}",
}

MAX_COMBINATIONS = 10_000
MAX_CANDIDATES = 1_000_000  # for layouts
MAX_PROCESSES = 1_000_000

Choices = dict[str, list[Any]]  # the values of each dotted key
Combination = dict[str, Any]  # one value for each dotted key


def short_name(key: str) -> str:
    """Return a short name for a key: its flag in FLAGS (tp), or else its last word (learning_rate), or else, if another
    key ends in the same word, the key with an underscore (dataset_name, because of model.name).
    """
    for flag, known in FLAGS.items():
        if key == known:
            return flag
    last = key.split(".")[-1]
    same_ending = [other for other in leaf_keys() if other.split(".")[-1] == last]
    return last if len(same_ending) == 1 else key.replace(".", "_")


def canonical_json(value: Any) -> str:
    """Return a string that is equal for equal JSON values only. (In Python, 1 == True.)"""
    return json.dumps(value, sort_keys=True)


def combinations(choices: Choices, world_sizes: Sequence[int] | None, base: RawConfig) -> list[Combination]:
    """Return the Cartesian product of the choices.

    Args:
        choices: the values of each key.
        world_sizes: accepted numbers of processes; combinations with another number are dropped. Axes that are not
            among the choices then get sizes as described in `create_config.py --help`. None accepts any number.
        base: the config without the choices, as JSON.

    Raises:
        UserError: there is no combination.
    """
    layouts: list[Combination] = [{}]
    if world_sizes is not None:
        layouts = _layouts(choices, world_sizes, base)
        choices = {key: values for key, values in choices.items() if key not in AXES.values()}
    count = len(layouts) * math.prod(map(len, choices.values()))
    if count > MAX_COMBINATIONS:
        raise UserError(f"{count:,} combinations are more than {MAX_COMBINATIONS:,}; give fewer values")
    return [layout | other for layout in layouts for other in _all(choices)]


def _all(choices: Choices) -> list[Combination]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _layouts(choices: Choices, world_sizes: Sequence[int], base: RawConfig) -> list[Combination]:
    if min(world_sizes) < 1:
        raise UserError(f"--world_size {min(world_sizes)} should be a positive number of processes")
    if max(world_sizes) > MAX_PROCESSES:
        raise UserError(
            f"--world_size {max(world_sizes)} is more than {MAX_PROCESSES:,} processes; use a smaller number"
        )
    divisors = [n for n in range(1, max(world_sizes) + 1) if any(size % n == 0 for size in world_sizes)]
    section, given_axes = base.get("distributed"), choices.keys() & set(AXES.values())
    base_sizes = section if isinstance(section, dict) else {}
    sizes: Choices = {}
    for axis, key in AXES.items():
        if key in given_axes:
            sizes[key] = choices[key]
        elif axis == "dp" or not given_axes:
            sizes[key] = divisors
        else:
            sizes[key] = [base_sizes.get(f"{axis}_size", 1)]
        for size in sizes[key]:
            if type(size) is not int or size < 1:
                raise UserError(f"{key}={canonical_json(size)} should be a positive integer")
    candidates = math.prod(map(len, sizes.values()))
    if candidates > MAX_CANDIDATES:
        raise UserError(
            f"--world_size has {candidates:,} candidates for layouts; give the sizes of some axes, as in --tp 1 8"
        )
    layouts = [layout for layout in _all(sizes) if math.prod(layout.values()) in world_sizes]
    if not layouts:
        tried = " x ".join(f"{axis} {'|'.join(map(str, sizes[key]))}" for axis, key in AXES.items())
        wanted = " or ".join(map(str, world_sizes))
        raise UserError(f"--world_size {wanted}: no combination of {tried} has this product; use other sizes")
    return layouts


def folder_names(chosen: Sequence[Combination], brief: bool = False) -> list[str]:
    """Name each combination after the keys that vary and their values, like dp2_tp4_mbs8. The name of a single
    combination is "". A brief name omits defaults, such as axes of size 1, and the keys of BRIEF: dp32_pp2_zero3_zbv.

    Characters that are special to a shell or a file system become dashes. Values that can then no longer be
    distinguished, ignoring case, get some digits of a hash. No value contains a `_`, so different combinations have
    different names.
    """
    labels: dict[str, dict[str, str]] = {}  # key: {value as JSON: its part of the name}
    absent = {key: default_of(key) for combination in chosen for key in combination}
    for key in absent:
        values = {canonical_json(value): value for value in ((absent | each)[key] for each in chosen)}
        safe = {s: _safe(value if isinstance(value, str) else s) for s, value in values.items()}
        lower_case = [word.lower() for word in safe.values()]
        for s, word in safe.items():
            if lower_case.count(word.lower()) > 1:
                safe[s] = f"{word}-{hashlib.sha256(s.encode()).hexdigest()[:8]}"
        if len(values) > 1:
            part = BRIEF.get(key, short_name(key) + "{}") if brief else short_name(key) + "{}"
            default = canonical_json(default_of(key)) if brief else None
            labels[key] = {s: "" if s == default else part.format(word) for s, word in safe.items()}
    parts = [[labels[key][canonical_json((absent | each)[key])] for key in labels] for each in chosen]
    names = ["_".join(filter(None, each)) or "default" * brief * (len(chosen) > 1) for each in parts]
    assert len({name.lower() for name in names}) == len(chosen)
    return names


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text)[:40]
