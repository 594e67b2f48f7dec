"""A fake process group: one process plays any rank of any layout, and counts collectives and messages.

    with fake_rank(5, config.distributed):
        ...
        FakeGroup.messages      # number of each Message in which this rank took part

No data are transferred: every message counts as arrived immediately. Tensors may be on the meta device, where they
have shapes but no memory (torch's own "fake" backend has no point-to-point messages for them). An all-to-all of tensors
that have memory, such as numbers of rows for experts, copies: the other ranks send the same as this one.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import collectives
from picotron import process_group_manager as pgm
from picotron.config import Distributed
from picotron.context_parallel.context_parallel import ring, start_ring_step
from picotron.pipeline_parallel import pp_communications
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel import tp_communications
from workbench.pipelines.executor import reverse_groups
from workbench.variants.expert_parallel import expert_groups
from workbench.variants.zero1 import start_gather_of_slices, start_reduce_to_slices

AXES = ("dp", "pp", "cp", "tp", "cp_dp")
# Modules and functions that only communicate for others: a call site is a function that calls one of these.
CARRIERS = {module.__name__ for module in (collectives, pp_communications, tp_communications)}
CARRYING = {function.__code__ for function in (ring, start_ring_step, start_gather_of_slices, start_reduce_to_slices)}
OPERATIONS = {  # methods of a process group; older versions of torch have the names with _base
    "allreduce": "all-reduce",
    "all_gather_single": "all-gather",
    "_allgather_base": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "alltoall_base": "all-to-all",
    "send": "send",
    "recv": "receive",
}


class Message(NamedTuple):
    axis: str  # one of AXES, "world", "ep" or "edp", or "within pp" for a group inside of a pp group
    ranks: int  # in the group
    operation: str
    shape: tuple[int, ...]  # of the full tensor: the result of an all-gather, the input of a reduce-scatter
    dtype: torch.dtype
    call_site: str  # file and function in picotron

    @property
    def size(self) -> int:
        """Bytes of the full tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def sent(self) -> int:
        """Bytes that one rank sends, if collectives use a ring."""
        once = self.size * (self.ranks - 1) // self.ranks
        return {"send": self.size, "receive": 0, "all-reduce": 2 * once}.get(self.operation, once)


def message(operation: str, arguments: Iterable[Any], group: dist.ProcessGroup, frame: FrameType | None) -> Message:
    """Describe a collective or a message.

    Args:
        arguments: arguments of the operation: tensors, lists of one tensor, and options.
        frame: stack frame that calls the operation.
    """
    tensors = [each[0] if isinstance(each, list) and each else each for each in arguments]
    full = max((each for each in tensors if isinstance(each, Tensor)), key=Tensor.numel)
    return Message(axis_of(group), group.size(), operation, tuple(full.shape), full.dtype, call_site(frame))


def axis_of(group: dist.ProcessGroup) -> str:
    grid, ids = pgm.process_group_manager, set(dist.get_process_group_ranks(group))
    axes = {getattr(grid, f"{axis}_group"): axis for axis in AXES}
    axes |= {dist.group.WORLD: "world"} | {each: axis for axis, each in expert_groups.get(grid, {}).items()}
    if grid in reverse_groups:
        axes[reverse_groups[grid]] = "pp"
    around = next((axis for axis in AXES if ids <= set(getattr(grid, f"{axis}_group_ids"))), "world")
    return axes.get(group, f"within {around}")


def call_site(frame: FrameType | None) -> str:
    """Return the innermost function of ours on the stack that is not a carrier. When autograd calls the backward of
    a carrier, there is none: then return the outermost carrier.
    """
    found = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("picotron.", "workbench.")):
            found = frame
            if module not in CARRIERS and frame.f_code not in CARRYING:
                break
        elif found is not None and module not in ("torch.autograd.function", "torch._dynamo.eval_frame"):
            break
        frame = frame.f_back
    assert found is not None, "the operation was not called by our code"
    return f"{Path(found.f_code.co_filename).name} {found.f_code.co_qualname.split('.<locals>')[0]}"


class Arrived(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class FakeGroup(dist.ProcessGroup):
    """A process group whose methods, those that torch.distributed calls, only count: see `OPERATIONS`."""

    messages: ClassVar[Counter[Message]] = Counter()  # of all groups

    def count(self, operation: str, *arguments: Any) -> dist.Work:
        FakeGroup.messages[message(operation, arguments, self, sys._getframe(1))] += 1
        if operation == "all-to-all" and not arguments[0].is_meta:
            arrived, sent = (each.unflatten(0, (self.size(), -1)) for each in arguments[:2])
            arrived.copy_(sent[self.rank()])
        return Arrived()

    def getBackendName(self) -> str:
        return "fake_meta"

    def _get_backend(self, device: torch.device) -> Any:  # torch 2.15 asks it whether it sends a batch at once
        return self


for method, operation in OPERATIONS.items():
    setattr(FakeGroup, method, functools.partialmethod(FakeGroup.count, operation))


def _new_group(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return FakeGroup(rank, size)  # type: ignore[call-arg]  # torch's annotations know only groups with a store


dist.Backend.register_backend("fake_meta", _new_group, devices=["cpu"])


@contextlib.contextmanager
def fake_rank(rank: int, layout: Distributed) -> Iterator[None]:
    """Play one rank of a layout of any size, alone."""
    dist.init_process_group("fake_meta", store=dist.HashStore(), rank=rank, world_size=layout.world_size)
    try:
        setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
        yield
    finally:
        dist.destroy_process_group()
