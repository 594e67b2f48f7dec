"""Pipeline stages are parsed from text."""

import pytest

from picotron.console import UserError
from picotron.model.families import model_cost, part_costs
from tests.support.oracle import tiny_llama
from workbench.pipelines.layouts import parse_stages, stage_weights


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
    assert [stage.has_embedding for stage in stages] == ["E" in stage for stage in expected]
    assert [stage.has_head for stage in stages] == ["L" in stage for stage in expected]
    assert parse_stages("|".join(expected), layers, len(expected)) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|t|L", r"has 3 stages, but pp_size times pp_chunks \(of pp_engine\) is 2"),
        ("Ett|ttL", r"has 4 layers \(t\), but num_hidden_layers=3"),
        ("tt|tL", "has 0 E"),
        ("Etx|ttL", r"pp_layout='Etx\|ttL' at character 3, 'x'"),
        ("E((t*1000)*1000)*1000|L", "a repetition has up to 10000 symbols"),
        ("Ettt*0|L", r"character 5, '\*0'"),
        ("E((t|ttL", "lacks 2 closing parentheses at its end"),
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
