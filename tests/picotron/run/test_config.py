"""Validation of configs: rejected values, all of them at once."""

import json
from typing import Any

import pytest

from picotron.config import Distributed
from picotron.console import UserError
from picotron.run.config_reader import parse_config
from picotron.run.launch import check_world_size
from workbench.pipelines.engine import check_run

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


BAD: list[tuple[dict[str, Any], str]] = [
    ({"training__lerning_rate": 1e-3}, "training.lerning_rate; did you mean training.learning_rate?"),
    ({"trainning": {}}, "unknown key trainning; did you mean training?"),
    ({"model__seed": 1}, "did you mean training.seed?"),
    ({"model": {}}, "model.name is missing"),
    ({"distributed__dp_size": "2"}, 'distributed.dp_size="2"'),
    ({"environment__OMP_NUM_THREADS": "many"}, "environment.OMP_NUM_THREADS"),
    # one of each conflict in config_conflicts.py that test_all_mistakes_are_reported_at_once does not have
    ({"distributed": {"backend": "nccl", "use_cpu": True}}, "backend='nccl' needs GPUs"),
    ({"distributed": {"cp_size": 2, "use_cpu": False, "backend": "gloo"}}, "which pp_size=1 with cp_size=2 requires"),
    ({"training__decay_steps": 9}, "decay_steps=9 is for lr_scheduler='wsd'"),
    ({"training": {"lr_scheduler": "wsd", "warmup_steps": 185}}, "set decay_steps to at most 15"),
    ({"distributed__cp_size": 4, "training__seq_length": 1028}, "seq_length=1028 is not divisible by 8"),
    (
        {"distributed": {"cp_size": 2, "tp_size": 6, "sequence_parallel": True}, "training__seq_length": 16},
        "not divisible by 12",
    ),
    ({"distributed__cp_size": 2, "model__use_flash_attention": False}, "cp_engine='ring' needs fused attention"),
    (
        {"distributed": {"cp_size": 2, "use_cpu": False}, "model__dtype": "float64"},
        "no kernel for model.dtype='float64'",
    ),
    ({"model__float8": True, "model__dtype": "float64"}, "model.float8=true"),
    ({"dataset__completion_column": "a"}, "not completion_column='a'"),
    ({"dataset__prompt_column": "q", "dataset__completion_column": "q"}, "are both 'q'"),
    (
        {"dataset__messages_column": "chat", "dataset__text_column": "text"},
        "not text_column='text' and messages_column='chat'",
    ),
    ({"dataset__messages_column": "tools"}, "messages_column='tools'"),
    ({"dataset__long_samples": "cut"}, "long_samples='cut' is for samples"),
    ({"distributed__pp_engine": "gpipe"}, "no schedule 'gpipe'; choose one of afab, 1f1b"),
    (
        {"distributed__pp_size": 2, "logging__trace_steps": [3, 300]},
        "trace_steps=[3, 300] exceeds total_train_steps=200",
    ),
    ({"distributed__pp_chunks": 2}, "pp_chunks=2 needs a pipeline"),
    ({"distributed__pp_group_size": 2}, "pp_group_size=2 needs a pipeline"),
    ({"distributed__pp_memory": 2, "distributed__pp_engine": "auto"}, "pp_max_activations=2.0 needs a pipeline"),
    ({"distributed": {"pp_keep_activations": 2, "pp_size": 2}}, "not 'none'"),
    (
        {"distributed": {"pp_size": 2, "pp_group_size": 2, "pp_engine": "auto"}},
        "pp_group_size=2 cannot be used with pp_engine='auto'",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_config_rejects_bad_values_with_one_sentence(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config(changed(**changes))
    assert expected in str(error.value)
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
        "distributed.pp_max_activations=2.0 needs a pipeline, but pp_size=1",
        "distributed.pp_max_activations=2.0 is for pp_engine='auto', not '1f1b'",
        "training.seq_length=127 is not divisible by 4, as cp_size=2",
        "logging.trace_steps=[1] needs a pipeline, but pp_size=1",
        "needs 6 processes, but 5 started",
        "tp_size=3 does not split num_attention_heads=8",
    ):
        assert expected in found
    assert len(error.value.problems) == 10


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
        # defaults in the place of wrong values conflict with the model or with other keys
        ({"dataset": {"name": "a", "messages_column": 1, "long_samples": "cut"}}, ["dataset.messages_column=1"]),
        ({"distributed": {"pp_size": 2, "pp_engine": "zvb", "pp_chunks": 2}}, ["distributed.pp_engine: there", "dp_size=1 x"]),
        (
            {"distributed": {"pp_size": 2, "pp_engine": "zvb", "pp_layout": "Et|t|t|tL"}},
            ["distributed.pp_engine: there", "dp_size=1 x"],
        ),
        ({"distributed__pp_size": 8, "model__num_hidden_layers": "8"}, ["model.num_hidden_layers=", "dp_size=1 x"]),
        # keys of one word are also words of a sentence
        ({"distributed__tp_size": 3, "dataset__split": 1}, ["dataset.split=1", "dp_size=1 x", "tp_size=3 does not split"]),
    ],
)  # fmt: skip
def test_consequences_of_wrong_values_are_left_out(changes: dict[str, Any], found: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_config(changed(**changes), check_run)
    assert len(error.value.problems) == len(found)
    assert all(problem.startswith(start) for problem, start in zip(error.value.problems, found, strict=True))


def test_config_is_frozen_and_survives_a_round_trip_through_json() -> None:
    config = parse_config(changed(training__learning_rate=0.1 + 0.2))
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 1  # type: ignore[misc]
    assert parse_config(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("keys", "has_samples", "masks"),
    [
        ({}, False, False),
        ({"text_column": "body", "mask_documents": True}, False, True),
        ({"messages_column": "chat"}, True, True),
        ({"prompt_column": "q", "completion_column": "a", "mask_documents": False}, True, False),
    ],
)
def test_samples_attend_only_to_themselves_by_default(keys: dict[str, Any], has_samples: bool, masks: bool) -> None:
    section = parse_config(changed(dataset={"name": "python-stdlib"} | keys)).dataset
    assert (section.has_samples, section.masks_documents) == (has_samples, masks)


def test_check_world_size_rejects_a_wrong_number_of_processes() -> None:
    check_world_size(Distributed(dp_size=2, pp_size=3), 6)
    with pytest.raises(UserError, match="needs 4 processes, but 2 started"):
        check_world_size(Distributed(dp_size=4), 2)
