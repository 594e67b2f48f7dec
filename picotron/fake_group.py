"""A process group with nobody else in it, to count messages without sending any.

    dist.init_process_group("nobody", store=dist.HashStore(), rank=5, world_size=4096)
    ...
    FakeGroup.messages      # what this rank has sent and received: how many of each Message

Messages count as arrived, with whatever is in the tensors. These can be on the meta device, where they have a shape but
no memory (torch's own group of this kind does not take such tensors).
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.process_group_manager import AXES

PACKAGE = f"{Path(__file__).parent}/"
OPERATIONS = {  # of a process group, as its methods are called, in older versions with _base
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
    axis: str  # of AXES, "world", or of a group within one of these "within pp"
    ranks: int  # in the group
    operation: str
    shape: tuple[int, ...]  # of the whole tensor: an all-gather's result, what a reduce-scatter reduces
    dtype: torch.dtype
    where: str  # in picotron

    @property
    def size(self) -> int:
        """Of the whole tensor, in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def sent(self) -> int:
        """The bytes that one rank sends, if collectives go around a ring."""
        once = self.size * (self.ranks - 1) // self.ranks
        return {"send": self.size, "receive": 0, "all-reduce": 2 * once}.get(self.operation, once)


def message(operation: str, arguments: Iterable[Any], group: dist.ProcessGroup, frame: FrameType | None) -> Message:
    """
    Args:
        arguments: of the operation: tensors, a list of one tensor, and others.
        frame: that it is called from.
    """
    tensors = [each[0] if isinstance(each, list) and each else each for each in arguments]
    whole = max((each for each in tensors if isinstance(each, Tensor)), key=Tensor.numel)
    return Message(axis_of(group), group.size(), operation, tuple(whole.shape), whole.dtype, where(frame))


def axis_of(group: dist.ProcessGroup) -> str:
    grid, ids = pgm.process_group_manager, set(dist.get_process_group_ranks(group))
    groups = {axis: getattr(grid, f"{axis}_group") for axis in AXES} | {"world": dist.group.WORLD}
    around = next((axis for axis in AXES if ids <= set(getattr(grid, f"{axis}_group_ids"))), "world")
    return next((axis for axis, other in groups.items() if other is group), f"within {around}")


def where(frame: FrameType | None) -> str:
    """The innermost line of picotron, but for the files that only carry messages: utils and *_communications. If there
    are no others on this side of autograd, as in the backward of a function of theirs, the outermost of them.
    """
    found = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            found = frame
            if not path.endswith(("utils.py", "_communications.py")):
                break
        elif found is not None and not path.endswith("torch/autograd/function.py"):
            break
        frame = frame.f_back
    assert found is not None, "picotron does not send this"
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} {found.f_code.co_qualname.split('.<locals>')[0]}"


class Arrived(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class FakeGroup(dist.ProcessGroup):
    """Its methods are those that torch.distributed calls: see `OPERATIONS`."""

    messages: ClassVar[Counter[Message]] = Counter()  # of all groups

    def note(self, operation: str, *arguments: Any) -> dist.Work:
        FakeGroup.messages[message(operation, arguments, self, sys._getframe(1))] += 1
        return Arrived()

    def getBackendName(self) -> str:
        return "nobody"


for method, operation in OPERATIONS.items():
    setattr(FakeGroup, method, functools.partialmethod(FakeGroup.note, operation))


def _new_group(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return FakeGroup(rank, size)  # type: ignore[call-arg]  # its description is of groups that have a store


dist.Backend.register_backend("nobody", _new_group, devices=["cpu"])
