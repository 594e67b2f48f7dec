"""The combinations of several values for several keys, and a folder's name for each of them. No torch here."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from picotron.config_reader import leaf_keys
from picotron.errors import UserError

AXES = {axis: f"distributed.{axis}_size" for axis in ("dp", "pp", "cp", "tp")}
GLOBAL_BATCH = "global_batch_size"  # no key of the config: gradient_accumulation_steps follows from it
# The names that people know, from which those of folders are made, in this order; other keys come behind them.
FLAGS = AXES | {
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

Choices = dict[str, list[Any]]  # the values of each dotted key
Combination = dict[str, Any]  # one of these each


def short_name(key: str) -> str:
    """Of a dotted key: tp, learning_rate, dataset_name (as a model has a name, too)."""
    for flag, known in FLAGS.items():
        if key == known:
            return flag
    last = key.split(".")[-1]
    alike = [other for other in leaf_keys() if other.split(".")[-1] == last]
    return last if len(alike) == 1 else key.replace(".", "_")


def canonical_json(value: Any) -> str:
    """Values are the same if this is. (To Python, 1 is True.)"""
    return json.dumps(value, sort_keys=True)


def combinations(choices: Choices, world_sizes: Sequence[int] | None, base: dict[str, Any]) -> list[Combination]:
    """The cartesian product of the choices.

    Args:
        world_sizes: keep layouts of so many processes. Axes that are not among the choices then get some, see
            `create_config.py --help`.
        base: what the config is without the choices, as JSON.

    Raises:
        UserError: there are none.
    """
    if world_sizes is None:
        return _product(choices)
    layouts = _layouts(choices, world_sizes, base)
    others = _product({key: values for key, values in choices.items() if key not in AXES.values()})
    return [layout | other for layout in layouts for other in others]


def _product(choices: Choices) -> list[Combination]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _layouts(choices: Choices, world_sizes: Sequence[int], base: dict[str, Any]) -> list[Combination]:
    if min(world_sizes) < 1:
        raise UserError(f"--world_size {min(world_sizes)} should be a positive number of processes")
    divisors = [n for n in range(1, max(world_sizes) + 1) if any(size % n == 0 for size in world_sizes)]
    section, given = base.get("distributed"), choices.keys() & set(AXES.values())
    of_base = section if isinstance(section, dict) else {}
    sizes: Choices = {}
    for axis, key in AXES.items():
        if key in given:
            sizes[key] = choices[key]
        elif axis == "dp" or not given:
            sizes[key] = divisors
        else:
            sizes[key] = [of_base.get(f"{axis}_size", 1)]
        for size in sizes[key]:
            if type(size) is not int or size < 1:
                raise UserError(f"{key}={canonical_json(size)} should be a positive integer")
    layouts = [layout for layout in _product(sizes) if math.prod(layout.values()) in world_sizes]
    if not layouts:
        tried = " x ".join(f"{axis} {'|'.join(map(str, sizes[key]))}" for axis, key in AXES.items())
        raise UserError(f"{tried} never makes --world_size {' or '.join(map(str, world_sizes))}; use other sizes")
    return layouts


def folder_names(found: Sequence[Combination]) -> list[str]:
    """Of each combination what varies, like dp2_tp4_mbs8; "" if nothing does, in a single one.

    What a shell or a file system might read in its own way becomes a dash. Values that then look alike, also to file
    systems that ignore case, get some digits of a hash. So names differ if combinations do: a `_` is never in a value.
    """
    words: dict[str, dict[str, str]] = {}  # key: the word for each of its values
    for key in found[0]:
        values = {canonical_json(combination[key]): combination[key] for combination in found}
        safe = {s: _safe(value if isinstance(value, str) else s) for s, value in values.items()}
        seen = [word.lower() for word in safe.values()]
        for s, word in safe.items():
            if seen.count(word.lower()) > 1:
                safe[s] = f"{word}-{hashlib.sha256(s.encode()).hexdigest()[:8]}"
        if len(values) > 1:
            words[key] = {s: short_name(key) + word for s, word in safe.items()}
    names = ["_".join(words[key][canonical_json(combination[key])] for key in words) for combination in found]
    assert len({name.lower() for name in names}) == len(found)
    return names


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text)[:40]
