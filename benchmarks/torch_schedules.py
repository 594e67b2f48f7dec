"""Schedules of torch.distributed.pipelining, without modules and process groups."""

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from workbench.schedules.actions import AnyAction
from workbench.schedules.schedule_csv import parse_csv

CLASSES = {
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def torch_schedule(kind: type[Any], pp: int, micro_batches: int, chunks: int) -> Any:
    """Build a schedule of torch as rank 0 does, on stages without a module. The constructor validates it."""
    stages = [
        SimpleNamespace(
            has_backward=True,
            num_stages=pp * chunks,
            stage_index=chunk * pp,
            group_size=pp,
            group_rank=0,
            is_first=chunk == 0,
            is_last=False,
            submod=None,
            device="cpu",
            group=None,
            stage_index_to_group_rank=None,
        )
        for chunk in range(chunks)
    ]
    return kind(stages, micro_batches)


def torch_programs(name: str, pp: int, micro_batches: int, chunks: int = 2) -> list[list[AnyAction]]:
    """Return the programs of all ranks as torch runs them, with messages, without FSDP's actions."""
    plan = torch_schedule(CLASSES[name], pp, micro_batches, chunks).pipeline_order_with_comms
    return parse_csv("\n".join(",".join(map(str, plan[rank])) for rank in range(pp)), name)
