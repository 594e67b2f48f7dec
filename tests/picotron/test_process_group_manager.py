"""The grid of ranks: tp ranks are neighbours, and dp ranks are the farthest apart."""

import pytest

from picotron import process_group_manager as pgm
from picotron.config import Distributed
from picotron.console import UserError
from picotron.process_group_manager import setup_process_group_manager
from workbench.explain.fake_group import fake_rank

GROUPS_OF_RANK_17 = {
    "tp": [16, 17],
    "cp": [13, 15, 17],
    "pp": [17, 23],
    "dp": [5, 17],
    "cp_dp": [1, 3, 5, 13, 15, 17],
}


def test_groups_have_the_expected_ranks() -> None:
    with fake_rank(17, Distributed(dp_size=2, pp_size=2, cp_size=3, tp_size=2)):
        grid = pgm.process_group_manager
        assert {axis: getattr(grid, f"{axis}_group_ids") for axis in GROUPS_OF_RANK_17} == GROUPS_OF_RANK_17
        assert (grid.dp_rank, grid.pp_rank, grid.cp_rank, grid.tp_rank) == (1, 0, 2, 1)
        assert (grid.pp_prev_rank, grid.pp_next_rank) == (None, 23)
        assert (grid.cp_recv_rank, grid.cp_send_rank) == (15, 13)


def test_axes_with_equal_groups_share_them() -> None:
    """Each NCCL communicator takes time to create, and GPU memory."""
    with fake_rank(5, Distributed(dp_size=4, tp_size=2)):
        grid = pgm.process_group_manager
        assert grid.cp_dp_group is grid.dp_group
        assert grid.cp_dp_group_ids == [1, 3, 5, 7]


def test_wrong_product_of_sizes_raises() -> None:
    needs = pytest.raises(UserError, match="needs 4 ranks, but the process group has 2")
    with fake_rank(0, Distributed(dp_size=2)), needs:
        setup_process_group_manager(2, 1, 1, 2)
