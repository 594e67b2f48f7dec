"""Inputs that no program may accept, or answer with a traceback: each ends with one sentence per mistake.

The programs run in this process, up to the point where they would start other processes.
"""

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin
from unittest import mock

import pytest

import create_config
import submit_slurm_jobs
from picotron.console import UserError
from workbench.drawing import __main__ as drawing
from workbench.generation import program as generation
from workbench.pipelines.engine import check_layout
from workbench.run.checkpoint.safetensors_folder import SafetensorsFolder
from workbench.run.config_reader import leaf_keys, load_config, type_of
from workbench.run.model_config import Limits, load_model_config
from workbench.sweep import table as extract_metrics

TINY = json.loads(Path("template/tiny-llama/config.json").read_text())
BASE = json.loads(Path("template/base_config.json").read_text())
ON_BASE = ["--config", "template/base_config.json"]


def assert_rejected(call: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Assert that a program ends with a UserError, or prints an error and exits. Returns the message."""
    try:
        call()
    except UserError as error:
        message = str(error)
    except SystemExit as error:
        message = error.code if isinstance(error.code, str) else capsys.readouterr().err
        if error.code in (0, None):
            pytest.fail("it succeeded")
    else:
        pytest.fail("it was accepted")
    assert "Traceback" not in message
    assert "hf_secret" not in message
    assert len(message) < 2_000
    return message


def train(words: list[str]) -> None:
    """Run train.py up to the process groups."""
    config = load_config(words)
    check_layout(config, load_model_config(config.model))


# --------------------------------------------------------------------------------------------------- values of the keys


def kinds_of(annotation: Any) -> set[Any]:
    """Return the types in an annotation such as PositiveInt | None."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        parts = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
        return set().union(*map(kinds_of, parts))
    return {get_origin(annotation) or annotation}


def wrong_values(annotation: Any, lenient: bool = False) -> list[Any]:
    """Return values of a wrong type or out of range. If `lenient`, strings are parsed."""
    kinds = kinds_of(annotation)
    values = [{}, [[]], {"a": 0}]
    if list not in kinds:
        values.append([])
    if type(None) not in kinds:
        values.append(None)
    if str not in kinds:
        values += ["nonsense", ""]
    if not kinds & {int, float}:
        values += [-1, 3.5, 10**400]
    if bool not in kinds and not lenient:
        values.append(True)
    if kinds & {int, float}:
        values += [-(10**30), "x" if lenient else "1e3", "NaN"]
    return values


def hostile_values() -> Iterator[tuple[str, bytes]]:
    """Yield the name of every key of the config, and configs with its wrong values."""
    for key in leaf_keys():
        section, name = key.split(".")
        for value in wrong_values(type_of(key), key.startswith("environment.")):  # see picotron.config.Environment
            yield name, json.dumps(BASE | {section: BASE.get(section, {}) | {name: value}}).encode()


# ------------------------------------------------------------------------------------------------------------- files


CONFIG_FILES = [
    b"", b"[]", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"model":' * 5_000, b'{"model": {"name": "a", "name": "b"}}', b'{"training": NaN}',
    b'{"training": {"learning_rate": NaN}}', b'{"training": {"learning_rate": 1e999}}', b'{"training": {"seed": 1' + b"0" * 5_000 + b"}}",
    b'{"environment": ["hf_secret"]}', b'{"hf_token": "hf_secret"}', b'{"environment": {"TOKEN": "hf_secret"}}',
    b'{"model": {"name": "a\\u0000b"}}', b'{"model": {"name": "\\ud800"}}', b'{"checkpoint": {"save_dir": ""}}', b'{"$schema": {"x": 1}}',
]  # fmt: skip


MODEL_CONFIGS = [
    "llama", [], None, {"model_type": None}, {"model_type": "mamba"}, {"rope_theta": None, "rope_parameters": None},
    *({name: value} for name, field in Limits.model_fields.items() for value in wrong_values(field.annotation)),
    {"vocab_size": 2**40}, {"num_key_value_heads": 3}, {"head_dim": 3}, {"pad_token_id": 10**6}, {"eos_token_id": [2**70]},
    *({"rope_parameters": value} for value in (
        1, "default", {"rope_type": "default", "rope_theta": -1}, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )),
    {"hidden_act": "relu"}, {"hidden_act": None}, {"attention_dropout": 0.5}, {"tie_word_embeddings": "yes"}, {"quantization_config": {"bits": 4}},
    {"model_type": "mistral", "sliding_window": 5}, {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5},
    *({"model_type": "qwen3", "layer_types": value} for value in (["full_attention"] * 99, ["chunked_attention"] * 4)),
    {"model_type": "smollm3", "no_rope_layers": [1]},
]  # fmt: skip


INDEXES = [
    "", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "[" * 100_000,
    *(json.dumps({"weight_map": {"model.norm.weight": name}}) for name in (
        "", ".", "..", "/etc/passwd", "../secret", "a/b", "a\0b", 5, None, [], "no-such-file", "config.json", "empty", "a" * 300,
    )),
]  # fmt: skip


FILES = {
    "run.json": (
        lambda path: train(["--config", str(path)]),
        [*hostile_values(), *(("", each) for each in CONFIG_FILES)],
    ),
    "config.json": (
        lambda path: train([*ON_BASE, "--model.name", str(path.parent)]),
        [("", json.dumps(TINY | each if each and isinstance(each, dict) else each).encode()) for each in MODEL_CONFIGS],
    ),
    "model.safetensors.index.json": (
        lambda path: SafetensorsFolder(path.parent).read("model.norm.weight", (32,)),  # type: ignore[arg-type]
        [("", each.encode()) for each in INDEXES],
    ),
}


@pytest.mark.parametrize("file", FILES)
def test_files(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message about the value of a key names it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path.parent / "secret").write_bytes(b"")
    read, contents = FILES[file]
    for key, content in contents:
        (tmp_path / file).write_bytes(content)
        assert key in assert_rejected(lambda: read(tmp_path / file), capsys), content


# ------------------------------------------------------------------------------------------------------- command lines


def generate(words: list[str]) -> None:
    with mock.patch.object(sys, "argv", ["generate.py", *words]):
        generation.main()


COMMANDS = [  # a program, its first words, and some more; `@` stands for a folder
    (train, "", ["--config", "--config no/such.json", "--config ."]),
    (train, "--config template/base_config.json", [
        "--training.seq_length 0", "training.seq_length 4", "--training.seq_length",
        "--$schema.x 1", "--environment.HF_TOKEN=hf_secret", "--wandb.api_key hf_secret", "--model hf_secret", "--model.name no/such/folder",
        "--model.name README.md", "--model.num_hidden_layers 1000000000", "--distributed.pp_size 100000000", "--distributed.pp_engine csv:no.csv",
        "--schedule.pp_layout E(t*10000)*10000|L", "--schedule.pp_layout ((((", "--training.gradient_accumulation_steps 1000000000000",
        "--checkpoint.save_dir=", "--training.learning_rate nan", "HF_TOKEN=hf_secret", "-environment.HF_TOKEN=hf_secret",
        "--training.seed 1 hf_secret", "--environment.OMP_NUM_THREADS hf_secret", "--training.seed " + "[" * 100_000, "--training.seed 1" + "0" * 400,
        "--checkpoint.save_dir \udc80", "--training.adam_beta1 1",
    ]),
    (generate, "", [
        "", "--checkpoint", "--checkpoint no/such", "--checkpoint @", "--checkpoint README.md", "--checkpoint /",
        "--checkpoint template/tiny-llama", *(f"--checkpoint template/tiny-llama --{name} {value}" for name in ("temperature", "top_k", "seed", "max_new_tokens")
        for value in ("-1", "nan", "inf", "x", "-1e400", "1e400")), "--checkpoint . --seed 18446744073709551616", "--checkpoint . --max_new_tokens 1000000000000",
    ]),
    (drawing.main, "", [
        "", "none", "schedule", "schedule csv:x", "schedule 1f1b zbv", "csv", "csv no.csv", "search", "search_measured @ --memory 1",
        "search --memory 1 --activations", "search --memory 1 --activations 1",
        "measured", "measured @", "measured @ --step 0", "measured @ --step 7", "measured @ --step 1" + "0" * 400,
        "generation --groups 0", "generation --tokens 1000000", *(f"schedule 1f1b --{words}" for words in (
        "pp 0", "pp 1e3", "pp 100000000", "pp 100000 --micro_batches 100000", "micro_batches 1000000000000", "micro_batches nan",
        "chunks 2", "group_size 2", "p2p nan", "pp 1" + "0" * 400,
        "out a.png", "out /no/such/folder/a.svg", "out /", "out .svg/")),
    ]),
    (create_config.main, "--exp_name sweep --out_dir @", [
        "--exp_name", "--exp_name .", "--exp_name a/b", "--exp_name a\0b", "--exp_name a\nb", "--exp_name= ", "--world_size 0",
        "--world_size 720720", "--world_size 1000000007 --tp 3", "--tp 0", "--tp 2 2",
        "--global_batch_size 7 --dp 2", "--global_batch_size 8 --grad_acc_steps 2", "--mbs 0",
        "--config no.json", "--config README.md", "--hf_token hf_secret", "--hf_token=hf_secret", "--wandb_token hf_secret",
        "--environment.HF_TOKEN hf_secret", "--checkpoint.save_dir x", "--unknown 1", "word", "--training.sed 1", "--pp 100000", "--pp_engine none",
        "--model_name no/such", "--out_dir README.md", "--training.learning_rate nan", "--num_hidden_layers 1000000000",
        "--training.seed " + " ".join(map(str, range(10_001))), "--hardware H100 --best 3",
        *(f"--world_size 8 --hardware H100 --best 3 {words}" for words in ("--global_batch_size 7 --dp 8 --pp 1 --tp 1", "--global_batch_size 16 --gib 0.001")),
    ]),
    (submit_slurm_jobs.main, "", ["", "--inp_dir", "--inp_dir no/such", "--inp_dir README.md", "--inp_dir @/empty"]),
    (submit_slurm_jobs.main, "--inp_dir @/job", [
        "--local --timeout nan", "--local --timeout 0",
        "--grace x", "--only none", "--only", "--local --cancel", "--gpus_per_node 0",
        "--env_setup no.sh", "--env_setup .", "--nb_slurm_array 0", "--check_status --dry_run", "--timeout 5",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (program, [*first.split(), *(more.split(" ") if more else [])])
        for program, first, lines in COMMANDS
        for more in lines
    ],
    ids=lambda value: value.__module__ if callable(value) else repr(value)[:60],
)
def test_command_lines(
    program: Callable[[list[str]], object], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "config.json").write_text(json.dumps(BASE))
    message = assert_rejected(lambda: program([word.replace("@", str(tmp_path)) for word in words]), capsys)
    assert [path.parent.name for path in tmp_path.rglob("config.json")] == ["job"]
    if program is generate:  # not the folder alone, which has no weights
        assert all(option in message for option in words[2::2])


RECORDS = [
    b"", b"\xff\n", b"null\n", b'{"step": 1, "loss": "x"}\n', b"[" * 100_000 + b"\n", b'{"step": 2, "loss": 1' + b"0" * 400 + b"}\n",
]  # fmt: skip


def test_no_file_of_a_run_stops_the_table_of_a_sweep(tmp_path: Path) -> None:
    good = b'{"step": 1, "loss": 2.5, "memory_gb": 1.0, "tokens_per_second_per_gpu": 10.0, "mfu": null}\n'
    files = ("run/metrics.jsonl", "status.txt", "slurm_job_id.txt", "config.json", "run/config.json")
    damages = [("other", b""), *itertools.product(files, RECORDS)]
    for i, (file, content) in enumerate(damages):
        (tmp_path / f"{i}" / "run").mkdir(parents=True)
        (tmp_path / f"{i}" / "config.json").write_text(json.dumps(BASE))
        (tmp_path / f"{i}" / "status.txt").write_text("completed\n")
        (tmp_path / f"{i}" / "run" / "metrics.jsonl").write_bytes(good)
        (tmp_path / f"{i}" / file).write_bytes(content + good if file.endswith("metrics.jsonl") else content)
    extract_metrics.main(["--inp_dir", str(tmp_path), "--warmup", "0"])
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "metrics.csv").open())}
    assert len(rows) == len(damages)
    assert [rows["0"][key] for key in ("status", "step", "problem")] == ["completed", "1", ""]
    for i, (file, content) in enumerate(damages):
        assert rows[f"{i}"]["problem"] or not content or file == "slurm_job_id.txt"
