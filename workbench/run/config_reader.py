"""Reader of configs: a JSON file and dotted command-line overrides become a checked `Config`.

    config = load_config(["--config", "template/base_config.json", "--training.learning_rate", "1e-3"])

The reader reports all wrong values together; if there are none, it reports all conflicts between keys. Each mistake is
one sentence with the key, the value and the remedy. `layout_checks` then compares the config with the model and the
machine. Overrides are merged into the JSON before it is validated, so values from the file and from the command line
have the same types and errors. (pydantic-settings would add a second set of rules for the command line. It also reads
environment variables, which must not change a run.)
"""

import argparse
import difflib
import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from picotron.config import Config, Schedule, Section, leaf_of, read_string
from picotron.console import UserError
from workbench.console import Parser, invalid_value, number
from workbench.files import read_object
from workbench.run.config_conflicts import conflicts

logger = logging.getLogger("picotron")

RawConfig = dict[str, Any]  # a config as JSON, which may have mistakes
# Keys of other trainers and of earlier versions. They are accepted with a warning, and their values are never stored.
IGNORED = {
    "dataset.num_workers": "batches are slices of a mapped file, which the training process reads",
    "environment.FLASH_ATTEN": "model.use_flash_attention selects the attention kernel",
    "environment.TOKENIZERS_PARALLELISM": "tokenisation uses dataset.num_proc processes",
    "environment.HF_TOKEN": "secrets do not belong in configs and commands, which are recorded: log in with `hf auth login`, or set HF_TOKEN in the shell",
}
# Earlier names of keys. Files, finished runs and command lines may have them.
RENAMED = {
    "distributed.pp_memory": "schedule.pp_max_activations",
    "distributed.pp_costs": "schedule.pp_recording",
    **{f"distributed.{key}": f"schedule.{key}" for key in Schedule.model_fields},
}


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Iterate over the names and the types of the sections."""
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        yield name, field.annotation


def leaf_keys() -> dict[str, str]:
    """Map each dotted key of the config to its help text and default, as --help shows them."""
    lines = {}
    for section, body in sections():
        for key, leaf in body.model_fields.items():
            default = "required" if leaf.is_required() else json.dumps(leaf.default)
            lines[f"{section}.{key}"] = f"{leaf.description or ''} [{default}]".strip()
    return lines


def current_keys(data: RawConfig) -> RawConfig:
    """Return a copy of the JSON of a config in which keys have their current names, without the ignored ones. Logs a
    warning for each ignored key.

    Raises:
        UserError: a key is there with both its names.
    """
    kept = {section: dict(body) if isinstance(body, dict) else body for section, body in data.items()}
    if isinstance(data.get("$schema"), str):
        del kept["$schema"]
    for section, name in [(section, name) for section, body in data.items() if isinstance(body, dict) for name in body]:
        if (key := f"{section}.{name}") in IGNORED:
            logger.warning("%s is ignored: %s", key, IGNORED[key])
            del kept[section][name]
        elif key in RENAMED:
            place, _, current = RENAMED[key].partition(".")
            target = kept.setdefault(place, {})
            if not isinstance(target, dict) or current in target:
                raise UserError(f"{key} is the earlier name of {RENAMED[key]}; remove one of them")
            target[current] = kept[section].pop(name)
    return kept


def read_config(path: Path) -> RawConfig:
    """Read the JSON of a config, see `current_keys`. The names of models and data that are not in the current folder,
    but beside the file or in a folder above it, become paths of those, so that a config can be used from anywhere.

    Raises:
        UserError: as `read_object` and `current_keys`.
    """
    data = current_keys(read_object(path))

    def found(name: Any) -> Any:
        """Return the path of a name, or the value itself if there is none."""
        if not isinstance(name, str) or not name or os.path.exists(name):
            return name
        places = (folder / name for folder in path.resolve().parents)
        return next((str(place) for place in places if os.path.exists(place)), name)

    for section, keys in (("model", ("name", "tokenizer")), ("dataset", ("name", "eval_name", "mixture"))):
        body: Any = data.get(section)
        for key in keys if isinstance(body, dict) else ():
            value = body.get(key)
            if isinstance(value, dict):
                body[key] = {found(name): weight for name, weight in value.items()}
            elif value is not None:
                body[key] = found(value)
    return data


def unknown_key(key: str) -> str:
    """Error message for an unknown key. It omits the value, which may be a secret under a misspelt key."""
    name = key.split(".")[-1]
    known = {k.split(".")[-1]: k for k in (leaf_keys() if "." in key else Config.model_fields)}
    near = [name] if name in known else difflib.get_close_matches(name, known, n=1)
    return f"unknown key {key}; " + (f"did you mean {known[near[0]]}?" if near else "train.py --help lists the keys")


def _sentence(error: Any) -> str:
    """Format a pydantic error as one sentence with the key, the value and the remedy."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown_key(key)
    if error["type"] == "missing":
        return f"{key} is missing; set it in the file or with --{key}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    # The value of a section, a list or an object is not shown: it may be long, or contain a secret.
    if len(error["loc"]) == 1 or error["loc"][0] == "environment" or isinstance(error["input"], dict | list):
        return f"{key}: {error['msg'].replace('Input should', 'it should')}"
    return invalid_value(error)


def parse_config(data: RawConfig) -> Config:
    """Validate a dict that was read from JSON.

    Raises:
        UserError: one problem per wrong value; if there is none, one per conflict between keys.
    """
    try:
        # With every section present, a section that is missing is reported by the keys that it needs.
        config = Config.model_validate({section: {} for section in Config.model_fields} | current_keys(data))
    except ValidationError as error:
        raise UserError(*map(_sentence, error.errors())) from None
    if problems := list(conflicts(config)):
        raise UserError(*problems)
    try:
        os.fsencode(json.dumps(config.model_dump(mode="json"), ensure_ascii=False))
    except UnicodeEncodeError as error:
        raise UserError(
            f"the config has {error.object[error.start]!r}, but names of files have the encoding {error.encoding} in this "
            f"locale; set PYTHONUTF8=1"
        ) from None
    return config


def type_of(key: str) -> Any:
    """Type of a dotted key's values; None if the key is unknown."""
    leaf = leaf_of(key)
    return leaf and leaf.annotation


def read_value(key: str, word: str) -> Any:
    """Parse a command-line word as the value of a dotted key: as JSON, except for keys whose values are strings."""
    return word if type_of(key) in (str, str | None) and word != "null" else read_string(word)


def override(data: RawConfig, key: str, value: Any) -> None:
    """Set the value of a dotted key in the JSON of a config, in place."""
    section, _, name = key.partition(".")
    body = data.setdefault(section, {})
    if not isinstance(body, dict):
        raise UserError(f"--{key}: {section!r} is a value in the file; it should be a section, an object {{...}}")
    body[name] = value


def json_schema() -> dict[str, Any]:
    """JSON schema with which editors complete and check a config that refers to it by "$schema"."""
    schema = Config.model_json_schema()
    schema["properties"]["$schema"] = {"type": "string"}
    return schema


def apply_overrides(data: RawConfig, arguments: list[str]) -> None:
    """Apply overrides of the form `--section.key value` or `--section.key=value` to `data`, in place."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        key = words.pop(0)
        if not key.startswith("--") or "." not in key:
            shown = f"{key.partition('=')[0]!r}" if key.startswith("-") else "without a key"  # it may be a secret
            raise UserError(f"unexpected argument {shown}; overrides look like --training.learning_rate 1e-3")
        if not words or (words[0].startswith("--")):
            raise UserError(f"{key} needs a value; add it after the key, as in --training.seed 1")
        name = key.removeprefix("--")
        if name == "environment.HF_TOKEN":
            raise UserError(f"{key} is not accepted: {IGNORED[name]}")
        name = RENAMED.get(name, name)
        override(data, name, read_value(name, words.pop(0)))


class Options(NamedTuple):
    """Parsed command line of train.py."""

    data: RawConfig  # the config as JSON
    explain: bool  # print what each rank holds and sends, instead of training
    evaluate: str | None  # print the loss of the model on this data set, instead of training
    hardware: str | None  # with explain: forecast the time of a step on it
    gib: float | None  # with explain: say whether each rank fits


def load_config(arguments: list[str], description: str = "A program with a config of train.py.") -> Config:
    """Return the config of the command line of another program than train.py: `--config FILE`, and any number of dotted
    overrides. `--help` prints the description and all keys, and exits. See `parse_config`.
    """
    return parse_config(read_arguments(config_parser(description), arguments)[1])


def read_arguments(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, RawConfig]:
    """Parse a command line with `--config FILE`, dotted overrides and the options of `parser`. Returns these options,
    and the config as JSON.

    Raises:
        UserError: an option has no value, or the file cannot be read.
    """
    parser.add_argument("--config", help="JSON file with the config of the run")
    known, overrides = parser.parse_known_args(arguments)
    if known.config is None:
        raise UserError("no config given; use --config FILE, for example --config template/base_config.json")
    data = read_config(Path(known.config))
    apply_overrides(data, overrides)
    return known, data


def config_parser(description: str, used: Collection[str] | None = None) -> Parser:
    """Return a parser whose help lists the keys of the config, which are left over by `parse_known_args`.

    Args:
        used: keys that have an effect, by default all.
    """
    keys = "\n".join(f"  --{key}  {text}" for key, text in leaf_keys().items() if used is None or key in used)
    return Parser(
        description=description,
        epilog=f"each key of the config can be overridden (values are JSON, defaults are in brackets):\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_command_line(arguments: list[str]) -> Options:
    """Parse the command line of train.py: `--config FILE`, any number of dotted overrides, and `--explain` with its
    options.

    `--help` and `--schema` (the JSON schema of the config) print their text and exit.

    Raises:
        UserError: an option has no effect or no value, or the file cannot be read.
    """
    parser = config_parser("Train a Llama-like model.")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the config and exit")
    instead = parser.add_mutually_exclusive_group()
    text = "print what each rank holds and sends in a step, and exit; needs one process, whatever the layout"
    instead.add_argument("--explain", action="store_true", help=text)
    text = "print the loss and the bits per byte of the model on a data set, any that dataset.name may be, and exit"
    instead.add_argument("--evaluate", metavar="NAME", help=text)
    text = "with --explain: also forecast the time of a step on H100, H200, A100, L40S, RTX4090, this or a JSON file"
    parser.add_argument("--hardware", metavar="NAME", help=text)
    text = "with --explain: say whether a rank fits into this memory; by default into that of --hardware"
    parser.add_argument("--gib", type=number(float, 0), metavar="N", help=text)
    if "--schema" in arguments:
        print(json.dumps(json_schema(), indent=2))
        raise SystemExit(0)
    known, data = read_arguments(parser, arguments)
    for option in ("hardware", "gib"):
        if getattr(known, option) is not None and not known.explain:
            raise UserError(f"--{option} describes a layout, and needs --explain; add it, or remove --{option}")
    return Options(data, known.explain, known.evaluate, known.hardware, known.gib)
