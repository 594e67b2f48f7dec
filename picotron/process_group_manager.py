"""The grid of all ranks: dp x pp x cp x tp.

Ranks are numbered like the elements of an array of this shape. So the ranks of a tp group are consecutive and can share
a machine, which matters because tensor parallelism communicates most. The ranks of a dp group are far apart, which
matters little because they communicate once per step. The ranks of a group differ in the coordinate of their axis (in
two, if the axis is cp_dp) and share all others. For 8 ranks as dp 2 x pp 2 x cp 1 x tp 2,

    dp 0: pp 0: tp [0 1]     pp 1: tp [2 3]         rank 5 = (dp 1, pp 0, cp 0, tp 1); its tp group is [4, 5],
    dp 1: pp 0: tp [4 5]     pp 1: tp [6 7]         its pp group [5, 7], its dp group [1, 5].
"""

import os

import torch
import torch.distributed as dist

from picotron.console import UserError


def new_groups(rows: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Create a group for each row of global ranks, and return the one that contains this process, or None.

    Every process must create all groups, in the same order: torch.distributed requires it.
    """
    if all(len(ids) == 1 for ids in rows):  # a process needs no others to create a group of its own
        return dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    groups = {tuple(ids): dist.new_group(ids, backend=backend) for ids in rows}
    return next((group for ids, group in groups.items() if dist.get_rank() in ids), None)


class ProcessGroupManager:
    """The grid, and this process's place in it. For each axis: the group of this process (`{axis}_group`), the global
    ranks of its members (`{axis}_group_ids`), their number (`{axis}_world_size`) and this process's index among them
    (`{axis}_rank`).

    Gradients are averaged over `cp_dp`: along both axes, ranks hold the same weights and process different tokens.
    """

    def __init__(self, tp_size: int, cp_size: int, pp_size: int, dp_size: int) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank))
        if tp_size * cp_size * pp_size * dp_size != self.world_size:
            raise UserError(
                f"dp {dp_size} x pp {pp_size} x cp {cp_size} x tp {tp_size} needs {tp_size * cp_size * pp_size * dp_size} "
                f"ranks, but the process group has {self.world_size}; choose sizes whose product is {self.world_size}"
            )
        self.grid = grid = torch.arange(self.world_size).view(dp_size, pp_size, cp_size, tp_size)

        # The axis of the groups becomes the last dimension: each row is a group.
        self.dp_group, self.dp_group_ids, self.dp_world_size, self.dp_rank = self._join(grid.movedim(0, -1))
        self.pp_group, self.pp_group_ids, self.pp_world_size, self.pp_rank = self._join(grid.movedim(1, -1))
        self.cp_group, self.cp_group_ids, self.cp_world_size, self.cp_rank = self._join(grid.movedim(2, -1))
        self.tp_group, self.tp_group_ids, self.tp_world_size, self.tp_rank = self._join(grid)
        dp = self.dp_group, self.dp_group_ids, self.dp_world_size, self.dp_rank  # is cp_dp without context parallelism
        cp_dp = self._join(grid.permute(1, 3, 0, 2).flatten(2)) if cp_size > 1 else dp  # of rows (pp, tp, dp cp)
        self.cp_dp_group, self.cp_dp_group_ids, self.cp_dp_world_size, self.cp_dp_rank = cp_dp

        self.pp_is_first_stage = self.pp_rank == 0
        self.pp_is_last_stage = self.pp_rank == pp_size - 1  # if each rank has one stage
        self.pp_prev_rank = None if self.pp_is_first_stage else self.pp_group_ids[self.pp_rank - 1]
        self.pp_next_rank = None if self.pp_is_last_stage else self.pp_group_ids[self.pp_rank + 1]
        self.cp_send_rank = self.cp_group_ids[(self.cp_rank + 1) % cp_size]  # the ring: send to the next,
        self.cp_recv_rank = self.cp_group_ids[(self.cp_rank - 1) % cp_size]  # receive from the previous
        for group in (self.pp_group, self.cp_group):
            first_communication(group)

    def _join(self, rows: torch.Tensor) -> tuple[dist.ProcessGroup, list[int], int, int]:
        """Create a group for each row of ranks.

        Returns:
            The group of this process, its ranks, their number, and the place of this process among them.
        """
        all_ids: list[list[int]] = rows.reshape(-1, rows.size(-1)).tolist()
        group, ids = new_groups(all_ids), next(row for row in all_ids if self.global_rank in row)
        assert group is not None
        return group, ids, len(ids), ids.index(self.global_rank)

    def __str__(self) -> str:
        dp, pp, cp, tp = self.grid.shape
        return f"dp {dp} x pp {pp} x cp {cp} x tp {tp}"


def first_communication(group: dist.ProcessGroup | None) -> None:
    """Communicate in a group on GPUs. The first communication must involve all its ranks; only then can some of them
    call `batch_isend_irecv` without the others. It also creates NCCL's communicator, whose buffers take GPU memory.
    """
    if dist.get_backend() == "nccl" and dist.get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


process_group_manager: ProcessGroupManager = None  # type: ignore[assignment]  # set by the next function


def setup_process_group_manager(tp_size: int, cp_size: int, pp_size: int, dp_size: int) -> ProcessGroupManager:
    """Create the grid from the ranks of the default process group. Modules import it by
    `from picotron import process_group_manager as pgm`, and read `pgm.process_group_manager`.

    Raises:
        UserError: the product of the sizes is not the world size.
    """
    global process_group_manager
    process_group_manager = ProcessGroupManager(tp_size, cp_size, pp_size, dp_size)
    return process_group_manager
