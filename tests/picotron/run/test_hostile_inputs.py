"""Inputs that no program may accept, or answer with a traceback: each ends with one sentence per mistake.

The programs run in this process, up to the point where they would start other processes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from conformance.oracle import tiny_llama
from picotron.run.checkpoint.safetensors_folder import SafetensorsFolder
from picotron.run.config_reader import leaf_keys, load_config, type_of
from picotron.run.model_config import load_model_config
from tests.support.hostile import CONFIG_FILES, assert_rejected
from workbench.pipelines.engine import check_layout

TINY: dict[str, Any] = json.loads(Path("template/tiny-llama/config.json").read_text())
BASE = ["--config", "template/base_config.json"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the files of an input. `@` in an argument stands for it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def train(words: list[str]) -> None:
    """Run train.py up to the process groups."""
    config = load_config(words)
    check_layout(config, load_model_config(config.model))


# --------------------------------------------------------------------------------------------------- values of the keys


def base_types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation such as PositiveInt | None."""
    if get_origin(annotation) is Annotated:
        yield from base_types(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from base_types(each)
    else:
        yield annotation


def hostile_values() -> Iterator[tuple[str, Any]]:
    """Yield values of a wrong type or out of range for every key of the config."""
    for key in leaf_keys():
        kinds = {get_origin(kind) or kind for kind in [*base_types(type_of(key))]}
        lenient = key.startswith("environment.")  # its strings are parsed, see picotron.config.Environment
        values: list[Any] = [[], {}, [[]], {"a": 0}]
        if type(None) not in kinds:
            values.append(None)
        if str not in kinds:
            values += ["nonsense", ""]
        if not kinds & {int, float}:
            values += [-1, 3.5, 10**400]
        if bool not in kinds and not lenient:
            values.append(True)
        if kinds & {int, float}:
            values += [-(10**30), "1e3" if not lenient else "x", "NaN"]
        yield from ((key, value) for value in values if not (key == "logging.trace_steps" and value == []))


@pytest.mark.parametrize(("key", "value"), list(hostile_values()), ids=repr)
def test_values_of_config_keys(key: str, value: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(Path("template/base_config.json").read_text())
    section, name = key.split(".")
    data.setdefault(section, {})[name] = value
    (folder / "config.json").write_text(json.dumps(data))
    assert name in assert_rejected(lambda: train(["--config", str(folder / "config.json")]), capsys)


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("content", CONFIG_FILES, ids=lambda content: repr(content[:60]))
def test_config_files(content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_bytes(content)
    message = assert_rejected(lambda: train(["--config", str(folder / "config.json")]), capsys)
    assert "hf_secret" not in message


TRAIN_WORDS = [
    "--config", "--config no/such.json", "--config .", "--training.seq_length 0", "--training", "training.seq_length 4", "--training.seq_length",
    "--$schema.x 1", "--environment.HF_TOKEN=hf_secret", "--wandb.api_key hf_secret", "--model hf_secret", "--model.name no/such/folder",
    "--model.name README.md", "--model.num_hidden_layers 1000000000", "--distributed.pp_size 100000000", "--distributed.pp_engine csv:no.csv",
    "--schedule.pp_layout E(t*10000)*10000|L", "--schedule.pp_layout ((((", "--training.gradient_accumulation_steps 1000000000000",
    "--checkpoint.save_dir=", "--training.learning_rate nan", "--training.learning_rate inf", "HF_TOKEN=hf_secret", "-environment.HF_TOKEN=hf_secret",
    "--training.seed 1 hf_secret", "--environment.OMP_NUM_THREADS hf_secret", "--training.seed " + "[" * 100_000, "--training.seed 1" + "0" * 400,
    "--checkpoint.save_dir \udc80", "--training.adam_beta1 1",
]  # fmt: skip


@pytest.mark.parametrize("words", TRAIN_WORDS, ids=lambda words: repr(words[:60]))
def test_command_lines_of_train(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = [] if words.startswith("--config") else BASE
    assert "hf_secret" not in assert_rejected(lambda: train([*base, *words.split(" ")]), capsys)


MODEL_CONFIGS: list[Any] = [
    "llama", [], None, {"model_type": None}, {"model_type": "mamba"},
    *({key: value} for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") for value in (0, None, "8", 1.5, 2**40)),
    *({"num_key_value_heads": value} for value in (0, "8", 3)), {"head_dim": 3}, {"head_dim": "8"},
    {"rope_theta": None, "rope_parameters": None}, {"rope_theta": "10", "rope_parameters": None},
    *({"rope_parameters": value} for value in (
        1, "default", {"rope_type": "default", "rope_theta": -1}, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )),
    {"pad_token_id": 10**6}, {"num_labels": 10**9}, {"pad_token_id": "x"}, {"pad_token_id": -5}, {"hidden_act": "relu"}, {"hidden_act": None},
    {"attention_dropout": 0.5}, {"rms_norm_eps": -1}, {"eos_token_id": [2**70]}, {"tie_word_embeddings": "yes"}, {"quantization_config": {"bits": 4}},
    *({"model_type": "qwen3", "initializer_range": value} for value in ("x", -0.5, 1e308)),
    *({"model_type": "mistral", "sliding_window": value} for value in (5, "x", True)),
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5},
    *({"model_type": "qwen3", "layer_types": value} for value in ("full_attention", ["full_attention"] * 99, ["chunked_attention"] * 4)),
    *({"model_type": "smollm3", "no_rope_layers": value} for value in ([1], "x", [[1]] * 2)), {"no_rope_layers": True},
    {"model_type": "smollm3", "no_rope_layer_interval": 0},
    *({"model_type": "granite", "logits_scaling": value} for value in (None, "x", 0)),
]  # fmt: skip


@pytest.mark.parametrize("changes", MODEL_CONFIGS, ids=repr)
def test_model_configs(changes: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(
        json.dumps(TINY | changes if changes and isinstance(changes, dict) else changes)
    )
    assert_rejected(lambda: train([*BASE, "--model.name", str(folder)]), capsys)


INDEXES: list[Any] = [
    "", "[]", "null", "1", "{}", "{", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": 5}', "[" * 100_000,
    *(json.dumps({"weight_map": {"model.norm.weight": name}}) for name in (
        "", ".", "..", "/etc/passwd", "../secret", "a/b", "a\0b", 5, None, [], {}, "no-such-file", "config.json", "empty", "a" * 300,
    )),
]  # fmt: skip


@pytest.mark.parametrize("content", INDEXES, ids=lambda content: repr(content[:60]))
def test_indexes_of_safetensors(content: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    (folder / "config.json").write_text("{}")
    (folder / "empty").write_bytes(b"")
    (folder.parent / "secret").write_bytes(b"")
    shape = tiny_llama().hidden_size
    assert_rejected(lambda: SafetensorsFolder(folder).read("model.norm.weight", shape), capsys)  # type: ignore[arg-type]
