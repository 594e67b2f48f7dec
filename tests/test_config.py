"""The config: what is accepted, what is refused and in which words."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from picotron.config import Distributed, UserError, check_world_size
from picotron.config_reader import json_schema, leaf_keys, load_config, parse_config

MINIMAL: dict[str, Any] = {"model": {"name": "template/tiny-llama"}, "dataset": {"name": "python-stdlib"}}

# A config in the format that users of Hugging Face's picotron have, with every key of it.
OTHER_TRAINERS = {
    "distributed": {
        "tp_size": 1,
        "cp_size": 1,
        "pp_size": 1,
        "dp_size": 2,
        "pp_engine": "1f1b",
        "backend": "nccl",
        "use_cpu": False,
    },
    "model": {
        "name": "HuggingFaceTB/SmolLM-360M-Instruct",
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "dtype": "bfloat16",
        "use_flash_attention": True,
        "use_fused_adam": True,
    },
    "training": {
        "seed": 42,
        "learning_rate": 3e-4,
        "total_train_steps": 200,
        "seq_length": 1024,
        "micro_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "num_samples": 400000,
        "max_tokens": None,
    },
    "dataset": {
        "name": "roneneldan/TinyStories",
        "subset_name": None,
        "split": "train",
        "num_workers": 0,
        "num_proc": 4,
    },
    "checkpoint": {"save_dir": "ckpt", "save_frequency": 300, "load_path": ""},
    "logging": {"use_wandb": False, "project_name": "picotron", "run_name": None},
    "environment": {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "FLASH_ATTEN": "1",
        "HF_TOKEN": "hf_abcdefghijklmnop",
    },
}


def write(folder: Path, data: object) -> str:
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def changed(**changes: Any) -> dict[str, Any]:
    """MINIMAL with `section__key=value` set."""
    data = json.loads(json.dumps(MINIMAL))
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data.setdefault(section, {})[name] = value
        else:
            data[section] = value
    return data


BAD = [
    # unknown and missing keys
    (
        changed(training__lerning_rate=1e-3),
        r"unknown key training\.lerning_rate; did you mean training\.learning_rate\?",
    ),
    (changed(trainning={}), r"unknown key trainning; did you mean training\?"),
    (changed(model__seed=1), r"unknown key model\.seed; did you mean training\.seed\?"),
    (changed(training__xyzzy=1), r"unknown key training\.xyzzy; train\.py --help lists the keys"),
    ({"model": {"name": "x"}}, r"dataset is missing; set it in the file"),
    ({"model": {}, "dataset": {"name": "x"}}, r"model\.name is missing; set it in the file or by --model\.name"),
    # wrong types
    (changed(distributed__dp_size="2"), r'distributed\.dp_size="2": it should be a valid integer'),
    (changed(distributed__dp_size=2.5), r"distributed\.dp_size=2\.5: it should be a valid integer"),
    (changed(distributed__use_cpu="yes"), r'distributed\.use_cpu="yes": it should be a valid boolean'),
    (changed(distributed__use_cpu=1), r"distributed\.use_cpu=1: it should be a valid boolean"),
    (changed(training__learning_rate="fast"), r'training\.learning_rate="fast": it should be a valid number'),
    (changed(training__learning_rate=None), r"training\.learning_rate=null: it should be a valid number"),
    (changed(model__name=7), r"model\.name=7: it should be a valid string"),
    (changed(training=[1, 2]), r"training: it should be a valid dictionary"),
    # impossible values
    (changed(distributed__dp_size=0), r"distributed\.dp_size=0: it should be greater than 0"),
    (changed(distributed__backend="mpi"), r"distributed\.backend=\"mpi\": it should be 'nccl' or 'gloo'"),
    (
        changed(distributed__backend="nccl", distributed__use_cpu=True),
        r"distributed: backend='nccl' needs GPUs, but use_cpu=true; set",
    ),
    (changed(model__dtype="float16"), r"model\.dtype=\"float16\": it should be 'bfloat16', 'float32' or 'float64'"),
    (changed(model__num_hidden_layers=0), r"model\.num_hidden_layers=0: it should be greater than 0"),
    (changed(training__learning_rate=0), r"training\.learning_rate=0: it should be greater than 0"),
    (changed(training__learning_rate=float("nan")), r"training\.learning_rate=NaN: it should be a finite number"),
    (changed(training__seq_length=-5), r"training\.seq_length=-5: it should be greater than 0"),
    (changed(training__adam_beta2=1.0), r"training\.adam_beta2=1\.0: it should be less than 1"),
    (changed(training__min_lr_ratio=1.5), r"training\.min_lr_ratio=1\.5: it should be less than or equal to 1"),
    (changed(training__max_grad_norm=0), r"training\.max_grad_norm=0: it should be greater than 0"),
    (
        changed(training__lr_scheduler="step"),
        r"training\.lr_scheduler=\"step\": it should be 'cosine', 'linear' or 'constant'",
    ),
    (
        changed(training__activation_checkpointing="some"),
        r"activation_checkpointing=\"some\": it should be 'none' or 'full'",
    ),
    (changed(training__warmup_steps=200), r"training: warmup_steps=200 must be less than total_train_steps=200"),
    (changed(logging__log_frequency=0), r"logging\.log_frequency=0: it should be greater than 0"),
    (
        changed(environment__OMP_NUM_THREADS="many"),
        r"environment\.OMP_NUM_THREADS=\"many\": it should be a valid integer",
    ),
    (
        changed(distributed__pp_size=2, distributed__use_cpu=False, distributed__backend="gloo"),
        r"backend='gloo' does not send from GPU to GPU, as pp_size=2 and cp_size=1 need; set backend to null, or use_cpu",
    ),
    (
        changed(distributed__cp_size=2, distributed__use_cpu=False, distributed__backend="gloo"),
        r"backend='gloo' does not send from GPU to GPU, as pp_size=1 and cp_size=2 need; set backend to null, or use_cpu",
    ),
    (
        changed(training__eval_frequency=500),
        r"eval_frequency=500 is never reached in total_train_steps=200; use at most",
    ),
    (
        changed(training__eval_frequency=5, training__eval_steps=0),
        r"training\.eval_steps=0: it should be greater than 0",
    ),
    (
        changed(distributed__cp_size=4, training__seq_length=1028),
        r"training\.seq_length=1028 does not divide by 8, as cp_size=4 with cp_sharding='zigzag' needs; use 1024 or 1032",
    ),
    (
        changed(distributed__cp_size=4, distributed__cp_sharding="contiguous", training__seq_length=3),
        r"does not divide by 4, as cp_size=4 with cp_sharding='contiguous' needs; use 4$",
    ),
    (
        changed(
            distributed__cp_size=2, distributed__tp_size=6, distributed__sequence_parallel=True, training__seq_length=16
        ),
        r"does not divide by 12, as cp_size=2 with cp_sharding='zigzag' and sequence_parallel with tp_size=6 need; use 12 or 24",
    ),
    (
        changed(distributed__cp_size=2, model__use_flash_attention=False),
        r"cp_engine='ring' needs fused attention kernels, but model\.use_flash_attention=false; set it to true, or cp_en",
    ),
    (
        changed(distributed__cp_size=2, distributed__use_cpu=False, model__dtype="float64"),
        r"cp_engine='ring' has no kernel for model\.dtype='float64' on GPUs; use float32, cp_engine 'ulysses', or use_cpu",
    ),
    (
        changed(distributed__pp_engine="gpipe"),
        r"distributed\.pp_engine: there is no schedule 'gpipe'; choose one of afab, 1f1b, looped_bfs, .*, or csv:FILE",
    ),
    (changed(distributed__pp_engine="csv:"), r"there is no schedule 'csv:'"),
    (changed(distributed__pp_chunks=0), r"distributed\.pp_chunks=0: it should be greater than 0"),
    (changed(logging__trace_steps=[1, "2"]), r'logging\.trace_steps\.1="2": it should be a valid integer'),
    (changed(logging__trace_steps=[3]), r"logging\.trace_steps=\[3\] is about pipelines, but pp_size=1; leave it out"),
    (
        changed(distributed__pp_size=2, logging__trace_steps=[3, 300]),
        r"logging\.trace_steps=\[3, 300\] goes beyond total_train_steps=200; use steps up to that",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_mistakes_get_one_sentence(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_config(data)
    assert len(str(error.value).splitlines()) == 1


def test_the_template_keeps_to_the_schema() -> None:
    schema = json_schema()
    for section, body in json.loads(Path("template/base_config.json").read_text()).items():
        assert section in schema["properties"]
        if isinstance(body, dict):
            definition = schema["$defs"][schema["properties"][section]["$ref"].split("/")[-1]]
            assert body.keys() <= definition["properties"].keys()


def test_a_section_that_is_no_section_is_not_shown() -> None:
    with pytest.raises(UserError) as error:
        parse_config(changed(environment=[{"HF_TOKEN": "hf_secret"}]))
    assert "environment: it should be a valid dictionary" in str(error.value)
    assert "hf_secret" not in str(error.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(UserError) as error:
        parse_config(changed(distributed__pp_chunks=0, training__seed=-1, training__seq_length=0, dataset__nmae="x"))
    assert [line.split("=")[0].split(";")[0] for line in str(error.value).splitlines()] == [
        "distributed.pp_chunks",
        "training.seed",
        "training.seq_length",
        "unknown key dataset.nmae",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no config; start with --config template/base_config.json"),
        (["--config", "no/such.json"], r"cannot read no/such\.json: No such file"),
        (["--config", "FILE", "--training.seed"], r"--training\.seed needs a value"),
        (["--config", "FILE", "--training.seed", "--training.seq_length", "8"], r"--training\.seed needs a value"),
        (
            ["--config", "FILE", "--seed", "1"],
            "unexpected argument '--seed'; overrides look like --training.learning_rate",
        ),
        (["--config", "FILE", "extra"], "unexpected argument 'extra'"),
        (["--config", "FILE", "--training.sed", "1"], r"unknown key training\.sed; did you mean training\.seed\?"),
        (["--config", "FILE", "--training.seed", "one"], r'training\.seed="one": it should be a valid integer'),
    ],
)
def test_command_line_mistakes(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(UserError, match=message):
        load_config([path if word == "FILE" else word for word in arguments])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON: .*line 1"),
        ("[1]", "holds a JSON list; it should hold an object"),
        ("", "is not valid JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(["--config", write(tmp_path, content)])


def test_overrides_have_the_types_of_the_file(tmp_path: Path) -> None:
    config = load_config([
        "--config", write(tmp_path, MINIMAL), "--training.learning_rate", "1e-3", "--distributed.use_cpu=true",
        "--model.name", "some/folder", "--training.max_grad_norm", "null", "--checkpoint.save_dir=a=b", "--logging.run_name", "42",
    ])  # fmt: skip
    assert config.training.learning_rate == 1e-3
    assert config.distributed.use_cpu is True
    assert (config.model.name, config.training.max_grad_norm) == ("some/folder", None)
    assert config.checkpoint.save_dir == "a=b"
    assert config.logging.run_name == "42"


def test_config_is_frozen_and_round_trips() -> None:
    config = parse_config(changed(training__learning_rate=0.1 + 0.2))
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 1  # type: ignore[misc]
    assert parse_config(json.loads(config.model_dump_json())) == config


def test_other_trainers_config_loads_with_warnings_and_without_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse_config(json.loads(json.dumps(OTHER_TRAINERS)))
    assert [line.split(" ")[0].split("=")[0] for line in caplog.messages] == [
        "environment.FLASH_ATTEN",
        "environment.HF_TOKEN",
    ]
    assert config.model.num_hidden_layers == 16
    assert config.environment.OMP_NUM_THREADS == 1
    assert config.environment.TOKENIZERS_PARALLELISM is False
    assert config.global_batch_size == 64
    assert "hf_abc" not in caplog.text + config.model_dump_json()
    with pytest.raises(UserError) as error:  # nor does an error show a misspelt secret
        parse_config(changed(environment__HFTOKEN="hf_abcdefghijklmnop"))
    assert "hf_abc" not in str(error.value)


def test_schema_file_is_what_the_code_says() -> None:
    written = json.loads(Path("template/config.schema.json").read_text())
    assert written == json.loads(json.dumps(json_schema())), "out of date; run `make schema`"
    assert (
        written["$defs"]["Training"]["properties"]["weight_decay"]["description"]
        == "on matrices only; norms and biases have none"
    )


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    text = capsys.readouterr().out
    assert len(leaf_keys()) > 40
    assert all(f"--{key} " in text for key in leaf_keys())


def test_a_schema_reference_in_the_file_is_for_editors() -> None:
    assert parse_config(MINIMAL | {"$schema": "config.schema.json"}) == parse_config(MINIMAL)


def test_world_size() -> None:
    check_world_size(Distributed(dp_size=2, pp_size=3), 6)
    with pytest.raises(
        UserError, match=r"dp_size=4 x .* needs 4 processes, but 2 started; use torchrun --nproc_per_node 4"
    ):
        check_world_size(Distributed(dp_size=4), 2)
