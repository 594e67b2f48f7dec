"""Pipeline stages: parsed from text, balanced by cost, and their weights."""

import pytest

from picotron.console import UserError
from picotron.model.flops import Cost
from picotron.pipeline_parallel.pp_layout import parse_stages
from picotron.pipeline_parallel.stages import _assign_layers
from workbench.schedules.actions import rank_of


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
        ("Ett|tmL", "has m"),
        ("Ett|t|L", r"has 3 stages, but pp_size times pp_chunks \(of pp_engine\) is 2"),
        ("Ett|ttL", r"has 4 layers \(t\), but num_hidden_layers=3"),
        ("tt|tL", "has 0 E"),
        ("Etx|ttL", r"pp_layout='Etx\|ttL' at character 3, 'x'"),
        ("E((t*1000)*1000)*1000|L", "a repetition has up to 10000 symbols"),
        ("E((t|ttL", "lacks 2 closing parentheses at its end"),
    ],
)
def test_parse_stages_rejects_bad_text(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_stages(text, num_layers=3, num_stages=2)


@pytest.mark.parametrize("placement", ["loop", "V"])
@pytest.mark.parametrize(("pp", "chunks"), [(4, 1), (4, 2), (3, 3)])
def test_balanced_layers_balance_ranks_with_several_chunks(pp: int, chunks: int, placement: str) -> None:
    """Moving a layer to another rank, or to another stage of the same rank, cannot improve the balance."""
    layer, embedding = Cost(1.0, 10), Cost(0.0, 25)
    num_stages = pp * chunks
    ranks = [rank_of(stage, pp, placement) for stage in range(num_stages)]  # type: ignore[arg-type]
    for head in (Cost(0.4, 25), Cost(2.3, 25), Cost(7.0, 25)):
        for layers in range(num_stages, 5 * num_stages + 3):
            ranges = _assign_layers(layers, num_stages, layer, embedding, head, ranks)
            assert [i for each in ranges for i in each] == list(range(layers))
            costs = [len(each) * layer.flops for each in ranges]
            costs[-1] += head.flops
            sums = [sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(pp)]
            for stage, each in enumerate(ranges):
                if len(each) > 1:
                    assert sums[ranks[stage]] <= min(sums) + layer.flops + 1e-9
                    costs_of_rank = [c for c, r in zip(costs, ranks, strict=True) if r == ranks[stage]]
                    assert costs[stage] <= min(costs_of_rank) + layer.flops + 1e-9
