"""Validation of configs: rejected values and their messages."""

import json
from typing import Any

import pytest

from picotron.command_line import parse_config
from picotron.config import Distributed
from picotron.console import UserError
from picotron.parallelize import check_run
from picotron.run.launch import check_world_size

MINIMAL: dict[str, Any] = {"model": {"name": "template/tiny-llama"}, "dataset": {"name": "python-stdlib"}}


def changed(**changes: Any) -> dict[str, Any]:
    """Return a copy of MINIMAL with `section__key=value` or `section=value` set."""
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
    ({"model": {"name": "x"}}, r"dataset is missing; set it in the file"),
    ({"model": {}, "dataset": {"name": "x"}}, r"model\.name is missing; set it in the file or with --model\.name"),
    # wrong types
    (changed(distributed__dp_size="2"), r'distributed\.dp_size="2": it should be a valid integer'),
    # impossible values
    (
        changed(distributed__backend="nccl", distributed__use_cpu=True),
        r"distributed\.backend='nccl' needs GPUs, but use_cpu=true; set",
    ),
    (
        changed(training__warmup_steps=200),
        r"training\.warmup_steps=200 must be less than total_train_steps=200; use at most 199$",
    ),
    (
        changed(training__decay_steps=9),
        r"training\.decay_steps=9 is for lr_scheduler='wsd', not 'cosine'; remove it$",
    ),
    (
        changed(training__lr_scheduler="wsd", training__warmup_steps=185),
        r"training\.warmup_steps=185 and the 20 decay_steps exceed total_train_steps=200; set decay_steps to at most 15$",
    ),
    (
        changed(environment__OMP_NUM_THREADS="many"),
        r"environment\.OMP_NUM_THREADS: it should be a valid integer",
    ),
    (
        changed(distributed__pp_size=2, distributed__use_cpu=False, distributed__backend="gloo"),
        r"backend='gloo' cannot send from GPU to GPU, which pp_size=2 with cp_size=1 requires; set backend to null, or",
    ),
    (
        changed(distributed__cp_size=2, distributed__use_cpu=False, distributed__backend="gloo"),
        r"backend='gloo' cannot send from GPU to GPU, which pp_size=1 with cp_size=2 requires; set backend to null, or",
    ),
    (
        changed(training__eval_frequency=500),
        r"eval_frequency=500 exceeds total_train_steps=200, so no evaluation would run; use at most 200, or 0",
    ),
    (
        changed(distributed__cp_size=4, training__seq_length=1028),
        r"training\.seq_length=1028 is not divisible by 8, as cp_size=4 with cp_sharding='zigzag' requires; use 1024 or 1032",
    ),
    (
        changed(
            distributed__cp_size=2, distributed__tp_size=6, distributed__sequence_parallel=True, training__seq_length=16
        ),
        r"is not divisible by 12, as cp_size=2 with cp_sharding='zigzag' and sequence_parallel with tp_size=6 require; use",
    ),
    (
        changed(distributed__cp_size=2, model__use_flash_attention=False),
        r"cp_engine='ring' needs fused attention, but model\.use_flash_attention=false; set that to true, or cp_engine",
    ),
    (
        changed(distributed__cp_size=2, distributed__use_cpu=False, model__dtype="float64"),
        r"cp_engine='ring' has no kernel for model\.dtype='float64' on GPUs; use model\.dtype='float32', cp_engine=",
    ),
    (
        changed(model__float8=True, model__dtype="float64"),
        r"model\.float8=true rounds the products of model\.dtype='float64'; use dtype='bfloat16'",
    ),
    (
        changed(dataset__prompt_column="q"),
        r"dataset: set text_column, or prompt_column and completion_column, or messages_column, not prompt_column='q'$",
    ),
    (changed(dataset__completion_column="a"), r"or messages_column, not completion_column='a'$"),
    (
        changed(dataset__prompt_column="q", dataset__completion_column="q"),
        r"dataset: prompt_column and completion_column are both 'q'; choose two columns$",
    ),
    (
        changed(dataset__prompt_column="q", dataset__completion_column="a", dataset__text_column="text"),
        r"not text_column='text' and prompt_column='q' and completion_column='a'$",
    ),
    (
        changed(dataset__messages_column="chat", dataset__text_column="text"),
        r"not text_column='text' and messages_column='chat'$",
    ),
    (changed(dataset__long_samples="cut"), r"long_samples='cut' is for samples, but the data set is text; remove it"),
    (
        changed(distributed__pp_engine="gpipe"),
        r"distributed\.pp_engine: there is no schedule 'gpipe'; choose one of afab, 1f1b, looped_bfs, .*, or csv:FILE",
    ),
    (changed(logging__trace_steps=[3]), r"logging\.trace_steps=\[3\] needs a pipeline, but pp_size=1; remove it"),
    (
        changed(distributed__pp_size=2, logging__trace_steps=[3, 300]),
        r"logging\.trace_steps=\[3, 300\] exceeds total_train_steps=200; use steps up to 200",
    ),
    # keys of pipelines
    (changed(distributed__pp_chunks=2), r"distributed\.pp_chunks=2 needs a pipeline, but pp_size=1; remove it$"),
    (
        changed(distributed__pp_group_size=2),
        r"distributed\.pp_group_size=2 needs a pipeline, but pp_size=1; remove it$",
    ),
    (
        changed(distributed__pp_memory=2, distributed__pp_engine="auto"),
        r"distributed\.pp_max_activations=2\.0 needs a pipeline, but pp_size=1; remove it$",
    ),
    (
        changed(distributed__pp_keep_activations=2, training__activation_checkpointing="full"),
        r"distributed\.pp_keep_activations=2 needs a pipeline, but pp_size=1; remove it$",
    ),
    (
        changed(distributed__pp_keep_activations=2, distributed__pp_size=2),
        r"distributed\.pp_keep_activations=2 needs training\.activation_checkpointing='full', not 'none', with which",
    ),
    (
        changed(distributed__pp_size=2, distributed__pp_memory=2),
        r"distributed\.pp_max_activations=2\.0 is for pp_engine='auto', not '1f1b'; remove it$",
    ),
    (
        changed(distributed__pp_size=2, distributed__pp_group_size=2, distributed__pp_engine="auto"),
        r"distributed\.pp_group_size=2 cannot be used with pp_engine='auto'; remove it$",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_config_rejects_bad_values_with_one_sentence(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_config(data)
    assert len(str(error.value).splitlines()) == 1


def test_all_mistakes_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind: type, unknown key, conflicts in a section and of sections, processes, and the model's heads."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    data = changed(
        training={"warmup_steps": 9, "total_train_steps": 9, "eval_frequency": 10, "seq_length": 127, "seed": "x"},
        distributed={"cp_size": 2, "tp_size": 3, "pp_engine": "1f1b", "pp_max_activations": 2, "use_cpu": True},
        dataset__nmae="x",
        logging__trace_steps=[1],
    )
    with pytest.raises(UserError) as error:
        parse_config(data, check_run)
    found = "\n".join(error.value.problems)
    for expected in (
        'training.seed="x": it should be a valid integer',
        "unknown key dataset.nmae; did you mean dataset.name?",
        "training.warmup_steps=9 must be less than total_train_steps=9",
        "training.eval_frequency=10 exceeds total_train_steps=9",
        "distributed.pp_max_activations=2 needs a pipeline, but pp_size=1",
        "distributed.pp_max_activations=2 is for pp_engine='auto', not '1f1b'",
        "training.seq_length=127 is not divisible by 4, as cp_size=2",
        "logging.trace_steps=[1] needs a pipeline, but pp_size=1",
        "needs 6 processes, but 5 started",
        "tp_size=3 does not split num_attention_heads=8",
    ):
        assert expected in found
    assert len(error.value.problems) == 10


def test_problems_of_a_valid_config_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    layout = {"tp_size": 3, "cp_size": 8, "cp_engine": "ulysses", "pp_size": 9, "use_cpu": True}
    with pytest.raises(UserError) as error:
        check_run(parse_config(changed(distributed=layout)))
    assert [next(word for word in words if word in problem) for words, problem in zip(
        (["but 5 started"], ["tp_size=3 does not split"], ["needs at least 9 layers"], ["over cp_size=8"]),
        error.value.problems, strict=True,
    )]  # fmt: skip


WARMUP = "training.warmup_steps=300 must be less"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"training__total_train_steps": 0}, ["training.total_train_steps=0"]),
        ({"training": [1]}, ["training: it should"]),
        ({"training__cls": 1, "training__warmup_steps": 300}, ["unknown key training.cls", WARMUP]),
        ({"model": None, "dataset": 7, "training__warmup_steps": 300}, ["model: it should", "dataset: it should", WARMUP]),
        (
            {"distributed__tp_size": "2", "model__num_attention_heads": "x", "training__warmup_steps": 300},
            ["distributed.tp_size=", "model.num_attention_heads=", WARMUP],
        ),
    ],
)  # fmt: skip
def test_checks_that_read_an_invalid_value_are_left_out(changes: dict[str, Any], found: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_config(changed(**changes), check_run)
    assert len(error.value.problems) == len(found)
    assert all(problem.startswith(start) for problem, start in zip(error.value.problems, found, strict=True))


def test_config_error_hides_the_contents_of_a_malformed_section() -> None:
    with pytest.raises(UserError) as error:
        parse_config(changed(environment=[{"HF_TOKEN": "hf_secret"}]))
    assert "environment: it should be a valid dictionary" in str(error.value)
    assert "hf_secret" not in str(error.value)


def test_config_is_frozen_and_survives_a_round_trip_through_json() -> None:
    config = parse_config(changed(training__learning_rate=0.1 + 0.2))
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 1  # type: ignore[misc]
    assert parse_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("keys", "columns", "masks"),
    [
        ({}, {"text_column": "text"}, False),
        ({"text_column": "body", "mask_documents": True}, {"text_column": "body"}, True),
        ({"messages_column": "chat"}, {"messages_column": "chat"}, True),
        (
            {"prompt_column": "q", "completion_column": "a", "mask_documents": False, "long_samples": "drop"},
            {"prompt_column": "q", "completion_column": "a"},
            False,
        ),
    ],
)
def test_columns_decide_whether_the_data_are_samples(keys: dict[str, Any], columns: Any, masks: bool) -> None:
    config = parse_config(changed(**{f"dataset__{key}": value for key, value in keys.items()}))
    section = config.dataset
    assert (section.columns, section.masks_documents) == (columns, masks)
    assert section.has_samples == ("text_column" not in columns)
    assert parse_config(json.loads(config.model_dump_json())) == config


def test_check_world_size_rejects_a_wrong_number_of_processes() -> None:
    check_world_size(Distributed(dp_size=2, pp_size=3), 6)
    with pytest.raises(
        UserError, match=r"dp_size=4 x .* needs 4 processes, but 2 started; use torchrun --nproc_per_node 4"
    ):
        check_world_size(Distributed(dp_size=4), 2)
