"""Buckets: many small gradients side by side in one buffer, so that they are reduced by one large message."""

import torch
import torch.distributed as dist
from torch import nn

from picotron.utils import all_reduce, wide_dtype


class Bucket:
    """Parameters whose `main_grad`s are views into one flat buffer, and the reduction of that buffer.

    Args:
        parameters: of one dtype and on one device.
        group: the ranks to average over.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self.group = parameters, group
        first, sizes = parameters[0], [p.numel() for p in parameters]
        self.buffer = torch.zeros(sum(sizes), dtype=wide_dtype(first), device=first.device)
        for parameter, view in zip(parameters, self.buffer.split(sizes), strict=True):
            parameter.main_grad = view.view_as(parameter)
        self.reset()

    def reset(self) -> None:
        """Expect the gradients of the next backward that reduces."""
        self.missing = set(self.parameters)
        self.work: dist.Work | None = None

    def launch(self) -> None:
        """Start to average the buffer over the group; the backward goes on meanwhile."""
        self.work = all_reduce(self.buffer, self.group, dist.ReduceOp.AVG, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def make_buckets(parameters: list[nn.Parameter], group: dist.ProcessGroup, megabytes: float) -> list[Bucket]:
    """Fill buckets of about `megabytes` in the order given; one that is larger than that gets its own."""
    buckets: list[Bucket] = []
    filling: list[nn.Parameter] = []
    size = 0.0
    for parameter in parameters:
        same = filling and (parameter.dtype, parameter.device) == (filling[0].dtype, filling[0].device)
        needed = parameter.numel() * wide_dtype(parameter).itemsize / 2**20
        if filling and (not same or size + needed > megabytes):
            buckets.append(Bucket(filling, group))
            filling, size = [], 0.0
        filling.append(parameter)
        size += needed
    return [*buckets, Bucket(filling, group)] if filling else buckets
