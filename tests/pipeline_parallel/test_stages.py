"""Pipeline stages: parsed from text, balanced by cost, and their weights."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.oracle import tiny_llama
from picotron.console import UserError
from picotron.model.flops import Cost, part_costs
from picotron.pipeline_parallel.stages import (
    _assign_layers,
    format_stages,
    parse_stages,
    stage_weights,
)
from picotron.schedules.actions import rank_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EtL", ["EtL"]),
        ("Et*3|(tt|)*5L", ["Ettt", "tt", "tt", "tt", "tt", "tt", "L"]),
        ("E|t|t|L", ["E", "t", "t", "L"]),
        ("E, t*2 ,|, (t,|)*2, ,L", ["Ett", "t", "t", "L"]),
        ("Et||*2t|L", ["Et", "", "", "t", "L"]),
        ("E((t*2|)*2t|)*2L", ["Ett", "tt", "t", "tt", "tt", "t", "L"]),
        ("E*1t(t)|tL*1", ["Ett", "tL"]),
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


def test_empty_first_and_last_stages_get_the_embedding_and_the_head() -> None:
    """Megatron-LM accepts such layouts, and its first and last stages always hold the embedding and the head."""
    assert list(map(str, parse_stages("||Ettt|L||", 3, 6))) == ["E", "", "ttt", "", "", "L"]
    assert list(map(str, parse_stages("|EtttL", 3, 2))) == ["E", "tttL"]
    assert list(map(str, parse_stages("EtttL|", 3, 2))) == ["Ettt", "L"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|tmL", "has m"),
        ("Ett|t|L", "has 3 stages, but the schedule has 2"),
        ("Ett|ttL", r"has 4 layers \(t\), but the model has 3"),
        ("tt|tL", "has 0 E"),
        ("tE|ttL", "has 1 E"),
        ("EEt|ttL", "has 2 E"),
        ("Ett|t", "has 0 L"),
        ("Ett|Lt", "has 1 L"),
        ("EtL|ttL", "has 2 L"),
        ("Etx|ttL", r"pp_layout='Etx\|ttL' at character 3, 'x'"),
        ("Et*0|ttL", r"at character 3, '\*0'"),
        ("Et(*2t)|tL", r"at character 4, '\*2'"),
        ("Et*2*2", r"at character 5, '\*2'"),
        ("E((t*1000)*1000)*1000|L", "a repetition has up to 10000 symbols"),
        ("E((t|ttL", "lacks 2 closing parentheses at its end"),
    ],
)
def test_parse_stages_rejects_bad_text(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_stages(text, num_layers=3, num_stages=2)


@given(st.text(alphabet="EtLm|()*,0123 ", max_size=12))
def test_parse_stages_accepts_or_rejects_any_text(text: str) -> None:
    try:
        result = "".join(map(str, parse_stages(text, num_layers=2, num_stages=2)))
    except UserError as error:
        result = str(error)
    assert result == "EttL" or result.removeprefix("cannot parse ").startswith(f"pp_layout={text!r} ")


def test_format_stages_has_a_row_for_each_pp_rank() -> None:
    """In a V, the last stage is on the first rank; in a loop, on the last one."""
    stages = parse_stages("Et*3||(t*2|)*2t|L", num_layers=8, num_stages=6)
    assert format_stages(stages, pp=3, placement="V").splitlines() == [
        "      chunk 0                         chunk 1",
        "pp 0  stage 0: embedding, layers 0-2  stage 5: head",
        "pp 1  stage 1: nothing                stage 4: layer 7",
        "pp 2  stage 2: layers 3-4             stage 3: layers 5-6",
    ]
    assert "pp 2  stage 2: layers 3-4             stage 5: head" in format_stages(stages, pp=3)


def all_splits(layers: int, stages: int) -> Any:
    if stages == 1:
        yield [layers]
        return
    for first in range(1, layers - stages + 2):
        for rest in all_splits(layers - first, stages - 1):
            yield [first, *rest]


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 2.3, 7.0])
def test_balanced_layers_minimise_the_heaviest_stage(head: float) -> None:
    layer, embedding = Cost(1.0, 10), Cost(0.0, 25)
    for stages in range(1, 5):
        for layers in range(stages, 10):

            def heaviest(counts: list[int]) -> Cost:
                costs = [Cost(count * layer.flops, count * layer.parameters) for count in counts]
                costs[0] += embedding
                costs[-1] += Cost(head, 25)
                return max(costs)

            ranges = _assign_layers(layers, stages, layer, embedding, Cost(head, 25))
            assert [i for r in ranges for i in r] == list(range(layers))
            assert min(len(r) for r in ranges) >= 1
            assert heaviest([len(r) for r in ranges]) == min(map(heaviest, all_splits(layers, stages)))


@pytest.mark.parametrize("placement", ["loop", "V"])
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (2, 2), (4, 2), (3, 3), (1, 4)])
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


def test_stage_weights_are_relative_flops() -> None:
    config = tiny_llama(num_hidden_layers=4)
    layer, embedding, head = part_costs(config, 16)
    weights = stage_weights(config, parse_stages("E|ttt|tL", 4, 3), 16, pp=3)
    total = 4 * layer.flops + head.flops
    assert embedding.flops == 0
    assert weights == pytest.approx([0, 9 * layer.flops / total, 3 * (layer.flops + head.flops) / total])
