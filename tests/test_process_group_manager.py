"""The grid of ranks: the groups of an axis hold the ranks that differ only in the coordinates of that axis."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from picotron.process_group_manager import AXES, setup_process_group_manager

COORDINATES = {"dp": "dp", "pp": "pp", "cp": "cp", "tp": "tp", "cp_dp": "dp cp"}


def expected_groups(dp: int, pp: int, cp: int, tp: int) -> list[dict[str, Any]]:
    """Return the members of each rank's groups, found by comparing coordinates."""
    places = [
        dict(zip(("dp", "pp", "cp", "tp"), c, strict=True)) for c in itertools.product(*map(range, (dp, pp, cp, tp)))
    ]
    ranks = []
    for me in places:
        groups = {}
        for axis, free in COORDINATES.items():
            fixed = [name for name in me if name not in free.split()]
            groups[axis] = [r for r, other in enumerate(places) if all(me[name] == other[name] for name in fixed)]
        ranks.append(groups | {"place": me})
    return ranks


def describe(tp: int, cp: int, pp: int, dp: int) -> dict[str, Any]:
    grid = setup_process_group_manager(tp, cp, pp, dp)
    described: dict[str, Any] = {"text": str(grid)}
    for axis in AXES:
        group = getattr(grid, f"{axis}_group")
        one = torch.ones(1) * 2.0**grid.global_rank  # the sum identifies the members of the group
        dist.all_reduce(one, group=group)
        described[axis] = getattr(grid, f"{axis}_group_ids")
        described[f"{axis} members"] = [r for r in range(grid.world_size) if int(one) >> r & 1]
        assert getattr(grid, f"{axis}_world_size") == dist.get_world_size(group) == len(described[axis])
        assert getattr(grid, f"{axis}_rank") == dist.get_rank(group) == described[axis].index(grid.global_rank)
    assert dist.get_process_group_ranks(grid.pp_reverse_group) == grid.pp_group_ids
    assert grid.pp_reverse_group is not grid.pp_group
    described |= {
        name: getattr(grid, name)
        for name in (
            "pp_is_first_stage",
            "pp_is_last_stage",
            "pp_next_rank",
            "pp_prev_rank",
            "cp_send_rank",
            "cp_recv_rank",
        )
    }
    return described


@pytest.mark.parametrize(("dp", "pp", "cp", "tp"), [(2, 1, 2, 2), (2, 3, 1, 1), (1, 1, 3, 2)])
def test_groups_have_the_expected_ranks(pool: WorkerPool, dp: int, pp: int, cp: int, tp: int) -> None:
    ranks = expected_groups(dp, pp, cp, tp)
    for rank, result in enumerate(pool.run(describe, dp * pp * cp * tp, tp, cp, pp, dp)):
        expected, place = ranks[rank], ranks[rank]["place"]
        for axis in AXES:
            assert result[axis] == expected[axis]
            assert result[f"{axis} members"] == sorted(expected[axis])
        assert result["text"] == f"dp {dp} x pp {pp} x cp {cp} x tp {tp}"
        assert result["pp_is_first_stage"] == (place["pp"] == 0)
        assert result["pp_is_last_stage"] == (place["pp"] == pp - 1)
        assert result["pp_prev_rank"] == (None if place["pp"] == 0 else expected["pp"][place["pp"] - 1])
        assert result["pp_next_rank"] == (None if place["pp"] == pp - 1 else expected["pp"][place["pp"] + 1])
        assert result["cp_send_rank"] == expected["cp"][(place["cp"] + 1) % cp]
        assert result["cp_recv_rank"] == expected["cp"][(place["cp"] - 1) % cp]


def wrong_product() -> str:
    with pytest.raises(UserError) as error:
        setup_process_group_manager(2, 1, 1, 2)
    return str(error.value)


def test_wrong_product_of_sizes_raises(pool: WorkerPool) -> None:
    assert pool.run(wrong_product, 2)[0] == (
        "dp 2 x pp 1 x cp 1 x tp 2 needs 4 ranks, but the process group has 2; choose sizes whose product is 2"
    )
