"""From a JSON file and dotted command-line overrides to a checked `Config`.

    config = load_config(["--config", "template/base_config.json", "--training.learning_rate", "1e-3"])

Every mistake is found here, before any process group exists, and is told in one sentence: the key, the value, the
remedy. Overrides are merged into the JSON before it is validated, so a file and the command line have the same types
and the same errors. (pydantic-settings would bring a second set of rules for the command line, and it reads the
environment, which must not decide anything here.)
"""

import argparse
import difflib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from picotron.config import Config, Section, read_string
from picotron.errors import UserError

logger = logging.getLogger("picotron")

# Keys that configs written for other trainers carry: accepted with a warning, and never stored.
IGNORED = {
    "environment.FLASH_ATTEN": "the attention kernel is chosen by model.use_flash_attention",
    "environment.HF_TOKEN": "secrets do not belong in configs: log in with `hf auth login`, or set HF_TOKEN in the shell",
}


def leaf_keys() -> dict[str, str]:
    """Every dotted key of the config with the line that --help shows for it."""
    lines = {}
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        for key, leaf in field.annotation.model_fields.items():
            default = "required" if leaf.is_required() else json.dumps(leaf.default)
            lines[f"{section}.{key}"] = f"{leaf.description or ''} [{default}]".strip()
    return lines


def _items(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The (dotted key, value) pairs of a two-level dict."""
    for section, body in data.items():
        if isinstance(body, dict):
            yield from ((f"{section}.{key}", value) for key, value in body.items())


def drop_ignored_keys(data: dict[str, Any]) -> dict[str, Any]:
    """A copy of `data` without the ignored keys, each of which gets a warning."""
    kept = {
        section: dict(body) if isinstance(body, dict) else body
        for section, body in data.items()
        if section != "$schema"
    }
    for key, _ in _items(data):
        section, _, name = key.partition(".")
        if key in IGNORED:
            logger.warning("%s is ignored: %s", key, IGNORED[key])
            del kept[section][name]
    return kept


def unknown(key: str) -> str:
    """The sentence for an unknown key. It has no value: the key may well be a misspelt secret."""
    name = key.split(".")[-1]
    known = {k.split(".")[-1]: k for k in (leaf_keys() if "." in key else Config.model_fields)}
    near = [name] if name in known else difflib.get_close_matches(name, known, n=1)
    return f"unknown key {key}; " + (f"did you mean {known[near[0]]}?" if near else "train.py --help lists the keys")


def _sentence(error: Any) -> str:
    """One pydantic error as one sentence with the key, the value and the remedy."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown(key)
    if error["type"] == "missing":
        return f"{key} is missing; set it in the file or by --{key}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if isinstance(error["input"], dict | list):  # not shown: it may be long, or hold a secret
        return f"{key}: {error['msg'].replace('Input should', 'it should')}"
    return f"{key}={json.dumps(error['input'], default=str)}: {error['msg'].replace('Input should', 'it should')}"


def parse_config(data: dict[str, Any]) -> Config:
    """Validate a dict as read from JSON.

    Raises:
        UserError: one line per mistake, naming the key, the value and the remedy.
    """
    try:
        return Config.model_validate(drop_ignored_keys(data))
    except ValidationError as error:
        mistakes = [_sentence(each) for each in error.errors()]
    raise UserError(*dict.fromkeys(mistakes))


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file, or a UserError that says what is wrong with it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the path of a JSON file") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a JSON {type(data).__name__}; it should hold an object {{...}} with sections")
    return data


def type_of(key: str) -> Any:
    """The type of a dotted key's values; None if there is no such key."""
    section, _, name = key.partition(".")
    field = Config.model_fields.get(section)
    leaf = getattr(field and field.annotation, "model_fields", {}).get(name)
    return leaf and leaf.annotation


def read_value(key: str, word: str) -> Any:
    """A word of the command line as a value of a dotted key: JSON, or for keys of strings as it is."""
    return word if type_of(key) in (str, str | None) and word != "null" else read_string(word)


def override(data: dict[str, Any], key: str, value: Any) -> None:
    """Write a value into the JSON of a config, in place."""
    section, _, name = key.partition(".")
    body = data.setdefault(section, {})
    if not isinstance(body, dict):
        raise UserError(f"--{key}: {section!r} is not a section of the file but a value")
    body[name] = value


def json_schema() -> dict[str, Any]:
    """The schema that editors use to complete and check a config; the config may refer to it by "$schema"."""
    schema = Config.model_json_schema()
    schema["properties"]["$schema"] = {"type": "string"}
    return schema


def _apply_overrides(data: dict[str, Any], arguments: list[str]) -> None:
    """Write `--section.key value` and `--section.key=value` into `data`; values are JSON, else plain strings."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        key = words.pop(0)
        if not key.startswith("--") or "." not in key:
            raise UserError(f"unexpected argument {key!r}; overrides look like --training.learning_rate 1e-3")
        if not words or (words[0].startswith("--")):
            raise UserError(f"{key} needs a value; for example {key} 1")
        name = key.removeprefix("--")
        override(data, name, read_value(name, words.pop(0)))


class Options(NamedTuple):
    """The command line of train.py."""

    config: Config
    explain: bool  # print what the layout holds and sends, instead of training


def load_config(arguments: list[str]) -> Config:
    """The config that a command line of train.py asks for, see `parse_command_line`."""
    return parse_command_line(arguments).config


def parse_command_line(arguments: list[str]) -> Options:
    """Parse the command line of train.py: `--config FILE`, any number of dotted overrides, and `--explain`.

    `--help` and `--schema` (the JSON schema, for editors) print and exit.

    Raises:
        UserError: see `parse_config`.
    """
    keys = "\n".join(f"  --{key}  {text}" for key, text in leaf_keys().items())
    parser = argparse.ArgumentParser(
        description="Train a Llama-like model.",
        epilog=f"any key of the config can be overridden (values are JSON):\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="the JSON file of the run")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the config and exit")
    text = "print what each rank holds and sends in a step, and exit; on one process, whatever the layout"
    parser.add_argument("--explain", action="store_true", help=text)
    known, overrides = parser.parse_known_args(arguments)
    if known.schema:
        print(json.dumps(json_schema(), indent=2))
        raise SystemExit(0)
    if known.config is None:
        raise UserError("no config; start with --config template/base_config.json")
    data = read_json(known.config)
    _apply_overrides(data, overrides)
    return Options(parse_config(data), known.explain)
