"""Which layers a stage holds: written layouts, balanced ones, and what they cost."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picotron.errors import UserError
from picotron.schedules.actions import rank_of
from picotron.schedules.costs import Cost, part_costs
from picotron.schedules.stages import (
    Stage,
    _hand_out,
    balanced_layers,
    balanced_stages,
    format_stages,
    parse_stages,
    stage_weights,
)
from tests.support.oracle import tiny_llama


@pytest.mark.parametrize(
    ("text", "stages"),
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
def test_layouts(text: str, stages: list[str]) -> None:
    layers = "".join(stages).count("t")
    layout = parse_stages(text, layers, len(stages))
    assert [str(stage) for stage in layout] == stages
    assert [i for stage in layout for i in stage.layers] == list(range(layers))
    assert [stage.has_embedding for stage in layout] == ["E" in stage for stage in stages]
    assert [stage.has_head for stage in layout] == ["L" in stage for stage in stages]
    assert parse_stages("|".join(stages), layers, len(stages)) == layout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Ett|tmL", "has m, multi-token prediction, which these models do not have; leave it out"),
        ("Ett|t|L", "has 3 stages, but ranks times chunks are 2"),
        ("", "has 1 stages, but ranks times chunks are 2"),
        ("Ett|ttL", r"has 4 layers \(t\), but the model has 3"),
        ("tt|tL", "has 0 E; it must have one, at its very beginning, as the first stage reads the tokens"),
        ("tE|ttL", "has 1 E; it must have one, at its very beginning"),
        ("|EtttL", "has 1 E; it must have one, at its very beginning"),
        ("EEt|ttL", "has 2 E; it must have one"),
        ("Ett|t", "has 0 L; it must have one, at its very end, as the last stage computes the loss"),
        ("Ett|Lt", "has 1 L; it must have one, at its very end"),
        ("EtttL|", "has 1 L; it must have one, at its very end"),
        ("EtL|ttL", "has 2 L; it must have one"),
        ("Etx|ttL", "makes no sense at character 3, 'x'; expected E, t, L, |, ( and ), and *n behind what"),
        ("Et*|ttL", r"makes no sense at character 3, '\*'"),
        ("Et*0|ttL", r"makes no sense at character 3, '\*0'"),
        ("*3", r"makes no sense at character 1, '\*3'"),
        ("Et(*2t)|tL", r"makes no sense at character 4, '\*2'"),
        ("Et*2*2", r"makes no sense at character 5, '\*2'"),
        ("Et*100000000|L", "at most 10000 parts in all"),
        ("E((t*1000)*1000)*1000|L", "at most 10000 parts in all"),
        ("Et*99999999999999999999999|L", "makes no sense at character 3"),
        ("Et)|ttL", r"makes no sense at character 3, '\)'"),
        ("E((t|ttL", "lacks 2 closing parentheses at its end"),
        ("Et\n|ttL", "makes no sense at character 3"),
    ],
)
def test_layouts_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse_stages(text, num_layers=3, num_stages=2)


@given(st.text(alphabet="EtLm|()*,0123 ", max_size=12))
def test_any_text_is_a_layout_or_refused(text: str) -> None:
    try:
        shown = "".join(map(str, parse_stages(text, num_layers=2, num_stages=2)))
    except UserError as error:
        shown = str(error)
    assert shown == "EttL" or shown.startswith(f"the layout {text!r} ")


def test_table() -> None:
    """In a V, the last stage is on the first rank."""
    layout = parse_stages("Et*3||(t*2|)*2t|L", num_layers=8, num_stages=6)
    assert format_stages(layout, pp=3, placement="V").splitlines() == [
        "        chunk 0                         chunk 1",
        "rank 0  stage 0: embedding, layers 0-2  stage 5: head",
        "rank 1  stage 1: nothing                stage 4: layer 7",
        "rank 2  stage 2: layers 3-4             stage 3: layers 5-6",
    ]
    assert "rank 2  stage 2: layers 3-4             stage 5: head" in format_stages(layout, pp=3)


def all_splits(layers: int, stages: int) -> Any:
    if stages == 1:
        yield [layers]
        return
    for first in range(1, layers - stages + 2):
        for rest in all_splits(layers - first, stages - 1):
            yield [first, *rest]


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 2.3, 7.0])
def test_no_other_split_has_a_lighter_heaviest_stage(head: float) -> None:
    layer, embedding = Cost(1.0, 10), Cost(0.0, 25)
    for stages in range(1, 5):
        for layers in range(stages, 10):

            def heaviest(counts: list[int]) -> Cost:
                costs = [Cost(count * layer.flops, count * layer.parameters) for count in counts]
                costs[0] += embedding
                costs[-1] += Cost(head, 25)
                return max(costs)

            ranges = _hand_out(layers, stages, layer, embedding, Cost(head, 25))
            assert [i for r in ranges for i in r] == list(range(layers))
            assert min(len(r) for r in ranges) >= 1
            assert heaviest([len(r) for r in ranges]) == min(map(heaviest, all_splits(layers, stages)))


def test_ends_with_a_large_vocabulary_get_fewer_layers() -> None:
    """The shape of Llama 3.1 8B: its head takes as long as two layers."""
    config = tiny_llama(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    assert [len(r) for r in balanced_layers(config, 4, 8192)] == [8, 8, 9, 7]
    tiny = tiny_llama(num_hidden_layers=8)
    assert [len(r) for r in balanced_layers(tiny, 4, 16)] == [2, 2, 2, 2]


@pytest.mark.parametrize("placement", ["loop", "V"])
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (2, 2), (4, 2), (3, 3), (1, 4)])
def test_a_rank_has_about_as_much_to_do_as_any_other(pp: int, chunks: int, placement: str) -> None:
    """No rank could give a layer to another one and be better off; nor could one of its stages."""
    layer, embedding = Cost(1.0, 10), Cost(0.0, 25)
    num_stages = pp * chunks
    ranks = [rank_of(stage, pp, placement) for stage in range(num_stages)]  # type: ignore[arg-type]
    for head in (Cost(0.4, 25), Cost(2.3, 25), Cost(7.0, 25)):
        for layers in range(num_stages, 5 * num_stages + 3):
            ranges = _hand_out(layers, num_stages, layer, embedding, head, ranks)
            assert [i for each in ranges for i in each] == list(range(layers))
            costs = [len(each) * layer.flops for each in ranges]
            costs[-1] += head.flops
            sums = [sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(pp)]
            for stage, each in enumerate(ranges):
                if len(each) > 1:
                    assert sums[ranks[stage]] <= min(sums) + layer.flops + 1e-9
                    mine = [c for c, r in zip(costs, ranks, strict=True) if r == ranks[stage]]
                    assert costs[stage] <= min(mine) + layer.flops + 1e-9


def test_one_stage_per_rank_is_as_before() -> None:
    config = tiny_llama(num_hidden_layers=9)
    layout = balanced_stages(config, seq_length=16, pp=4)
    assert [stage.layers for stage in layout] == balanced_layers(config, 4, 16)
    assert [(stage.has_embedding, stage.has_head) for stage in layout] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert balanced_stages(tiny_llama(), 16, 1) == [Stage(range(3), True, True)]


def test_a_large_head_is_balanced_over_the_ranks() -> None:
    """The shape of Llama 3.1 8B, whose head takes as long as two layers, on 4 ranks with two chunks."""
    config = tiny_llama(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    for placement in ("loop", "V"):
        layout = balanced_stages(config, 8192, 4, 2, placement)  # type: ignore[arg-type]
        weights = stage_weights(config, layout, 8192, pp=4)
        ranks = [sum(w for s, w in enumerate(weights) if rank_of(s, 4, placement) == rank) for rank in range(4)]  # type: ignore[arg-type]
        assert sum(ranks) == pytest.approx(4)
        assert max(ranks) < 1.08
        assert all(
            len(before.layers) > 0 and before.layers.stop == after.layers.start for before, after in pairwise(layout)
        )


def test_weights_are_the_flops_of_the_stages() -> None:
    config = tiny_llama(num_hidden_layers=4)
    layer, embedding, head = part_costs(config, 16)
    weights = stage_weights(config, parse_stages("E|ttt|tL", 4, 3), 16, pp=3)
    total = 4 * layer.flops + head.flops
    assert embedding.flops == 0
    assert weights == pytest.approx([0, 9 * layer.flops / total, 3 * (layer.flops + head.flops) / total])


def test_too_few_layers() -> None:
    message = (
        "pp_size=2 ranks with 2 chunks each make 4 stages, which need a layer each, but num_hidden_layers=3; use fewer"
    )
    with pytest.raises(UserError, match=message):
        balanced_stages(tiny_llama(), 16, 2, 2)
