"""Pipeline stages are balanced by cost."""

import pytest

from picotron.model.families import Cost
from picotron.pipeline_parallel.stages import balanced_layers
from workbench.schedules.actions import rank_of


@pytest.mark.parametrize("placement", ["loop", "V"])
@pytest.mark.parametrize(("pp", "chunks"), [(4, 1), (4, 2), (3, 3)])
def test_balanced_layers_balance_ranks_with_several_chunks(pp: int, chunks: int, placement: str) -> None:
    """Moving a layer to another rank, or to another stage of the same rank, cannot improve the balance."""
    layer, embedding = Cost(1.0, 10), Cost(0.0, 25)
    num_stages = pp * chunks
    ranks = [rank_of(stage, pp, placement) for stage in range(num_stages)]  # type: ignore[arg-type]
    for head in (Cost(0.4, 25), Cost(2.3, 25), Cost(7.0, 25)):
        for layers in range(num_stages, 5 * num_stages + 3):
            ranges = balanced_layers(layers, ranks, layer, embedding, head)
            assert [i for each in ranges for i in each] == list(range(layers))
            costs = [len(each) * layer.flops for each in ranges]
            costs[-1] += head.flops
            sums = [sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(pp)]
            for stage, each in enumerate(ranges):
                if len(each) > 1:
                    assert sums[ranks[stage]] <= min(sums) + layer.flops + 1e-9
                    costs_of_rank = [c for c, r in zip(costs, ranks, strict=True) if r == ranks[stage]]
                    assert costs[stage] <= min(costs_of_rank) + layer.flops + 1e-9
