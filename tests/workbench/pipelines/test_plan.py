"""The pipeline of a config: its schedule, its stages, which are parsed from text, and what does not fit."""

import re
from pathlib import Path
from typing import Any

import pytest

from picotron.console import UserError
from picotron.model.families import model_cost, part_costs
from tests.support.oracle import make_config, tiny_llama
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.layouts import parse_stages, stage_weights
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
    engine = changes.pop("pp_engine", "zb_h1").replace("FILE", f"{tmp_path}/1f1b.csv")
    config = make_config("pp2 m4", pp_engine=engine, **changes)
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
    assert make_config("pp2", **changes).needs_workbench
    assert not make_config("pp2").needs_workbench


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EtL", ["EtL"]),
        ("Et*3|(tt|)*5L", ["Ettt", "tt", "tt", "tt", "tt", "tt", "L"]),
        ("Et||*2t|L", ["Et", "", "", "t", "L"]),
        ("||Ettt|L||", ["E", "", "ttt", "", "", "L"]),  # as in Megatron-LM
    ],
)
def test_parse_stages_reads_the_notation(text: str, expected: list[str]) -> None:
    layers = "".join(expected).count("t")
    stages = parse_stages(text, layers, len(expected))
    assert [str(stage) for stage in stages] == expected
    assert [i for stage in stages for i in stage.layers] == list(range(layers))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|t|L", r"has 3 stages, but pp_size times pp_chunks \(of pp_engine\) is 2"),
        ("Ett|ttL", r"has 4 layers \(t\), but num_hidden_layers=3"),
        ("tt|tL", "has 0 E"),
        ("Etx|ttL", r"pp_layout='Etx\|ttL' from 'x\|ttL' on"),
        ("E((t*1000)*1000)*1000|L", "repeats .ttttttttt. 1000 times; use 1 to 10000 symbols"),
        ("Ettt*0|L", "repeats .t. 0 times"),
        ("E((t|ttL", r"from '\(\(t\|ttL' on"),
        ("Et*2*3|L", r"from '\*2\*3\|L' on"),
    ],
)
def test_parse_stages_rejects_bad_text(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_stages(text, num_layers=3, num_stages=2)


def test_the_weights_of_stages_are_their_shares_of_the_flops() -> None:
    model, stages = tiny_llama(num_hidden_layers=3), parse_stages("Ett|tL", 3, 2)
    first, last = stage_weights(model, stages, 16, pp=2)
    whole, layer = model_cost(model, 16).flops, part_costs(model, 16)[0].flops
    assert (first, last) == pytest.approx((2 * 2 * layer / whole, 2 * (1 - 2 * layer / whole)))
