"""Validation of configs: wrong values, conflicts between keys, and layouts that do not fit, each all at once."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from picotron.console import UserError
from tests.support.oracle import make_config
from workbench.pipelines.engine import check_run
from workbench.run.config_reader import parse_config

BAD = [
    ({"training__lerning_rate": 1e-3}, "training.lerning_rate; did you mean training.learning_rate?"),
    ({"model__seed": 1}, "did you mean training.seed?"),
    # one of each conflict in config_conflicts.py that test_each_round_reports_all_its_mistakes does not have
    ({"backend": "nccl"}, "backend='nccl' needs GPUs"),
    (
        {"cp_size": 2, "use_cpu": False, "backend": "gloo", "model__dtype": "float32"},
        "which pp_size=1 with cp_size=2 requires",
    ),
    ({"dp_size": 2, "cp_size": 2, "ep_size": 3}, "use a divisor of 4"),
    (
        {"dp_size": 2, "ep_size": 2, "logging__sample_prompt": "a", "training__eval_frequency": 1},
        "generates with distributed.ep_size=1",
    ),
    ({"training__decay_steps": 9}, "decay_steps=9 is for lr_scheduler='wsd'"),
    (
        {"training__lr_scheduler": "wsd", "training__total_train_steps": 200, "training__warmup_steps": 185},
        "set decay_steps to at most 15",
    ),
    ({"cp_size": 4, "training__seq_length": 1028}, "seq_length=1028 is not divisible by 8"),
    ({"cp_size": 2, "tp_size": 6, "sequence_parallel": True}, "not divisible by 12"),
    ({"cp_size": 2, "model__use_flash_attention": False}, "cp_engine='ring' needs fused attention"),
    ({"cp_size": 2, "use_cpu": False}, "no kernel for model.dtype='float64'"),
    ({"model__float8": True}, "model.float8=true"),
    ({"dataset__completion_column": "a"}, "not completion_column='a'"),
    ({"dataset__prompt_column": "q", "dataset__completion_column": "q"}, "are both 'q'"),
    (
        {"dataset__messages_column": "chat", "dataset__text_column": "text"},
        "not text_column='text' and messages_column='chat'",
    ),
    ({"dataset__long_samples": "cut"}, "long_samples='cut' is for samples"),
    ({"pp_engine": "gpipe"}, "no schedule 'gpipe'; choose one of afab, 1f1b"),
    ({"pp_size": 2, "logging__trace_steps": [3, 300]}, "trace_steps=[3, 300] exceeds total_train_steps=10"),
    ({"pp_chunks": 2, "schedule__pp_chunks": 2}, "distributed.pp_chunks is the earlier name of schedule.pp_chunks"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_config_rejects_bad_values_with_one_sentence(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        make_config(**changes)
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def problems_of(check: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(UserError) as error:
        check()
    return error.value.problems


def test_each_round_reports_all_its_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each config also has the mistakes of the later rounds, which are not reached."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    misfits = {"pp_size": 9, "cp_size": 2, "cp_engine": "ulysses", "tp_size": 3}
    misfits |= {"model__float8": True, "model__dtype": "bfloat16"}
    conflicts = {
        "training__warmup_steps": 300,
        "training__eval_frequency": 300,
        "training__seq_length": 126,
        "training__decay_steps": 9,
        "logging__trace_steps": [300],
    }
    wrong = {"training__seed": "x", "dataset__nmae": "x", "model__name": 1, "checkpoint__keep_last": "x"}
    assert len(problems_of(lambda: make_config(**misfits, **conflicts, **wrong))) == len(wrong)
    assert len(problems_of(lambda: make_config(**misfits, **conflicts))) == len(conflicts)
    config = make_config(**misfits)
    assert len(problems_of(lambda: check_run(config))) == 5  # processes, pp, cp, tp, float8


def test_config_survives_a_round_trip_through_json() -> None:
    config = make_config(training__learning_rate=0.1 + 0.2)
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
