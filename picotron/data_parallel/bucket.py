"""Buckets: the gradients of several parameters in one buffer, so that one large collective reduces them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron.collectives import accumulation_dtype, all_reduce
from picotron.weights import set_main_grad


class Bucket:
    """Parameters whose gradients are views of one flat buffer, and the reduction of that buffer.

    Args:
        parameters: parameters of one dtype on one device.
        group: the ranks to average over.
        multiple: number by which the size of the buffer is divisible; the buffer is padded.

    Attributes:
        gradients: the views, in which gradients accumulate; here they are also the `main_grad`s.
        pending_parameters: parameters whose gradient is not complete yet in a backward that reduces.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, multiple: int = 1) -> None:
        self.parameters, self.group = parameters, group
        first, sizes = parameters[0], [p.numel() for p in parameters]
        padded = -(-sum(sizes) // multiple) * multiple
        self.buffer = torch.zeros(padded, dtype=accumulation_dtype(first), device=first.device)
        views = self.buffer[: sum(sizes)].split(sizes)
        self.gradients: dict[Tensor, Tensor] = {p: v.view_as(p) for p, v in zip(parameters, views, strict=True)}
        for parameter, gradient in self.gradients.items():
            set_main_grad(parameter, gradient)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next backward that reduces."""
        self.pending_parameters: set[Tensor] = {p for p in self.parameters if p.requires_grad}  # frozen ones get none
        self.work: dist.Work | None = None

    def launch(self) -> None:
        """Start to average the buffer over the group, while backward continues."""
        self.work = all_reduce(self.buffer, self.group, dist.ReduceOp.AVG, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def make_buckets(
    parameters: list[nn.Parameter], group: dist.ProcessGroup, megabytes: float, kind: type[Bucket] = Bucket
) -> list[Bucket]:
    """Fill buckets of at least `megabytes` MiB, except the last one, in the given order. (With an upper limit instead,
    a norm's weight between two large matrices would have a bucket to itself.)
    """
    buckets: list[Bucket] = []
    filling: list[nn.Parameter] = []
    size = 0.0
    for parameter in parameters:
        if filling and (parameter.dtype, parameter.device) != (filling[0].dtype, filling[0].device):
            buckets.append(kind(filling, group))
            filling, size = [], 0.0
        filling.append(parameter)
        size += parameter.numel() * accumulation_dtype(parameter).itemsize / 2**20
        if size >= megabytes:
            buckets.append(kind(filling, group))
            filling, size = [], 0.0
    return [*buckets, kind(filling, group)] if filling else buckets
