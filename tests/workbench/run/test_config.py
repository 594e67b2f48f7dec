"""Validation of configs: wrong values, conflicts between keys, and layouts that do not fit, each all at once."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from picotron.console import UserError
from tests.support.oracle import config_data, make_config
from workbench.pipelines.engine import check_run
from workbench.run.config_reader import load_config, parse_config

BAD = [
    ("--training.lerning_rate 1e-3", "training.lerning_rate; did you mean training.learning_rate?"),
    ("--model.seed 1", "did you mean training.seed?"),
    # one of each conflict in config_conflicts.py that test_each_round_reports_all_its_mistakes does not have
    ("--distributed.backend nccl", "backend='nccl' needs GPUs"),
    (
        "--distributed.cp_size 2 --distributed.use_cpu false --distributed.backend gloo --model.dtype float32",
        "which pp_size=1 with cp_size=2 requires",
    ),
    ("--distributed.dp_size 2 --distributed.cp_size 2 --distributed.ep_size 3", "use a divisor of 4"),
    (
        "--distributed.dp_size 2 --distributed.ep_size 2 --logging.sample_prompt a --training.eval_frequency 1",
        "generates with distributed.ep_size=1",
    ),
    ("--training.decay_steps 9", "decay_steps=9 is for lr_scheduler='wsd'"),
    ("--training.lr_scheduler wsd --training.warmup_steps 5 --training.decay_steps 2", "set decay_steps to at most 1"),
    ("--distributed.cp_size 4 --training.seq_length 1028", "seq_length=1028 is not divisible by 8"),
    (
        "--distributed.cp_size 2 --distributed.tp_size 6 --distributed.sequence_parallel true",
        "not divisible by 12",
    ),
    ("--distributed.cp_size 2 --model.use_flash_attention false", "cp_engine='ring' needs fused attention"),
    ("--distributed.cp_size 2 --distributed.use_cpu false", "no kernel for model.dtype='float64'"),
    ("--model.float8 true", "model.float8=true"),
    ("--dataset.completion_column a", "not completion_column='a'"),
    ("--dataset.prompt_column q --dataset.completion_column q", "are both 'q'"),
    (
        "--dataset.messages_column chat --dataset.text_column text",
        "not text_column='text' and messages_column='chat'",
    ),
    ("--dataset.long_samples cut", "long_samples='cut' is for samples"),
    ("--distributed.pp_engine gpipe", "no schedule 'gpipe'; choose one of afab, 1f1b"),
    ("--distributed.pp_size 2 --logging.trace_steps [3,300]", "trace_steps=[3, 300] exceeds total_train_steps=6"),
]


@pytest.mark.parametrize(("words", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_config_rejects_bad_values_with_one_sentence(words: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(["--config", "docs/small.json", *words.split()])
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_key_and_its_earlier_name_are_not_both_given() -> None:
    with pytest.raises(UserError, match=r"distributed\.pp_chunks is the earlier name of schedule\.pp_chunks"):
        make_config(pp_chunks=2, schedule__pp_chunks=2)


def problems_of(check: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        check()
    return error.value.problems


def test_each_round_reports_all_its_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each config also has the mistakes of the later rounds, which are not reached."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    misfits = {"layout": "pp9 cp2 ulysses tp3 bfloat16", "model__float8": True}
    conflicts = {
        "training__warmup_steps": 300,
        "training__eval_frequency": 300,
        "training__seq_length": 126,
        "training__decay_steps": 9,
        "logging__trace_steps": [300],
    }
    wrong = {"training__seed": "x", "dataset__nmae": "x", "model__name": 1}
    data = config_data(**misfits, **conflicts, **wrong) | {"checkpoint": [1]}
    assert len(problems_of(lambda: parse_config(data))) == len(wrong) + 1
    assert "--model.name" in problems_of(lambda: parse_config({}))[0]
    assert len(problems_of(lambda: make_config(**misfits, **conflicts))) == len(conflicts)
    config = make_config(**misfits)
    assert len(problems_of(lambda: check_run(config))) == 5  # processes, pp, cp, tp, float8


def test_config_survives_a_round_trip_through_json() -> None:
    config = make_config(training__learning_rate=0.1 + 0.2, training__max_tokens=15 * 10**12)
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
    section = make_config(**{f"dataset__{key}": value for key, value in keys.items()}).dataset
    assert (section.has_samples, section.masks_documents) == (has_samples, masks)
