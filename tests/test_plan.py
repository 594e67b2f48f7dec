"""The schedule and the layout that a config asks for, and which ones do not fit each other."""

import re
from pathlib import Path
from typing import Any

import pytest

from picotron import config as config_module
from picotron.errors import UserError
from picotron.schedules.plan import plan_pipeline
from picotron.schedules.schedule_csv import write_csv
from picotron.schedules.schedules import SCHEDULES, build
from tests.support.oracle import make_config, tiny_llama


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_chunks": 2}, "zb_h1 has 1 chunk(s) per rank, not 2; for 2 use looped_bfs or interleaved_1f1b"),
        ({"pp_chunks": 3, "pp_engine": "zbv"}, "zbv has 2 chunk(s) per rank, not 3"),
        ({"pp_engine": "looped_bfs", "pp_chunks": 4}, "8 stages, which need a layer each, but num_hidden_layers=6"),
        ({"pp_layout": "Ettt|tttx"}, "the layout 'Ettt|tttx' makes no sense at character 9"),
        ({"pp_layout": "Ettt|tttt|L"}, "has 3 stages, but ranks times chunks are 2"),
        ({"pp_layout": "Ettt|ttL"}, "has 5 layers (t), but the model has 6"),
        (
            {"pp_engine": "zbv", "pp_layout": "Et|||tttttL"},
            "pp_layout='Et|||tttttL' leaves rank 1 of the pipeline without anything to do",
        ),
        ({"pp_engine": "csv:nowhere.csv"}, "cannot read the schedule 'nowhere.csv'"),
        ({"pp_engine": "csv:FILE", "pp_size": 3}, "is for distributed.pp_size=2, but the config says 3"),
        (
            {"pp_engine": "csv:FILE", "training__gradient_accumulation_steps": 8},
            "is for training.gradient_accumulation_steps=4, but the config says 8",
        ),
        ({"pp_engine": "csv:FILE", "pp_chunks": 2}, "is for distributed.pp_chunks=1, but the config says 2"),
        ({"pp_size": 1, "pp_chunks": 2}, "pp_chunks=2 is about pipelines, but pp_size=1; leave it out"),
        ({"pp_size": 1, "pp_layout": "Ettt|tttL"}, "has 2 stages, but ranks times chunks are 1"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_csv(build("1f1b", 2, 4).programs, tmp_path / "1f1b.csv")
    keys: dict[str, Any] = {"pp_engine": "zb_h1", "pp_size": 2, "training__gradient_accumulation_steps": 4, **changes}
    keys["pp_engine"] = keys["pp_engine"].replace("FILE", f"{tmp_path}/1f1b.csv")
    config = make_config(**{key if "__" in key else f"distributed__{key}": value for key, value in keys.items()})
    with pytest.raises(UserError, match=re.escape(message)) as error:
        plan_pipeline(config, tiny_llama(num_hidden_layers=6))
    assert len(str(error.value).splitlines()) == 1


def test_the_config_knows_every_schedule() -> None:
    assert tuple(SCHEDULES) == config_module.SCHEDULES


def test_one_process_needs_no_schedule() -> None:
    for engine in (*SCHEDULES, "csv:nowhere.csv"):
        plan = plan_pipeline(make_config(distributed__pp_engine=engine), tiny_llama())
        assert list(map(str, plan.stages)) == ["EtttL"]
        assert not plan.splits_backward


def test_too_few_layers() -> None:
    plan_pipeline(make_config(distributed__pp_size=3), tiny_llama())
    with pytest.raises(UserError, match="make 4 stages, which need a layer each, but num_hidden_layers=3; use fewer"):
        plan_pipeline(make_config(distributed__pp_size=4), tiny_llama())
