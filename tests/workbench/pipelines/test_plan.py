"""The pipeline of a config: its schedule and stages, and mismatches between config, schedule and model."""

import re
from pathlib import Path
from typing import Any

import pytest

from picotron.console import UserError
from tests.support.oracle import make_config, tiny_llama
from workbench.pipelines.engine import plan_pipeline
from workbench.schedules.schedule_csv import as_csv
from workbench.schedules.schedules import build


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pp_chunks": 3, "pp_engine": "zbv"},
            "pp_engine='zbv', pp_size=2, pp_chunks=3, gradient_accumulation_steps=4: zbv has 2 chunk(s) per pp rank, not 3",
        ),
        ({"pp_engine": "looped_bfs", "pp_chunks": 4}, "needs at least 8 layers"),
        ({"pp_engine": "zbv", "pp_layout": "Et|||tttttL"}, "pp_layout='Et|||tttttL' gives pp rank 1 nothing"),
        ({"pp_engine": "csv:FILE", "pp_size": 3}, "distributed.pp_size=2, but the config has 3"),
        ({"pp_size": 1, "pp_memory": 2, "pp_engine": "auto"}, "pp_max_activations=2.0 needs a pipeline"),
        ({"pp_max_activations": 2}, "is for pp_engine='auto', not 'zb_h1'"),
        ({"pp_keep_activations": 2}, "not 'none'"),
        ({"pp_group_size": 2, "pp_engine": "auto"}, "pp_group_size=2 cannot be used with pp_engine='auto'"),
    ],
)
def test_mismatch_is_rejected_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "1f1b.csv").write_text(as_csv(build("1f1b", 2, 4).programs))
    keys: dict[str, Any] = {"pp_engine": "zb_h1", "pp_size": 2, "training__gradient_accumulation_steps": 4, **changes}
    keys["pp_engine"] = keys["pp_engine"].replace("FILE", f"{tmp_path}/1f1b.csv")
    config = make_config(**keys)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        plan_pipeline(config, tiny_llama(num_hidden_layers=6))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"distributed__pp_engine": "zb_h1"},
        {"schedule__pp_chunks": 2},
        {"schedule__pp_group_size": 2},
        {"schedule__pp_keep_activations": 1, "training__activation_checkpointing": "full"},
        {"logging__trace_steps": [1]},
        {"logging__level": "debug"},
    ],
)
def test_what_the_two_loops_do_not_have_comes_from_the_workbench(changes: dict[str, Any]) -> None:
    assert make_config(distributed__pp_size=2, **changes).needs_workbench
    assert not make_config(distributed__pp_size=2).needs_workbench
