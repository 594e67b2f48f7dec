"""ZeRO-1: data parallelism in which the ranks divide the optimizer (Rajbhandari et al. 2019, arXiv:1910.02054).

With plain data parallelism, all n ranks of a `cp_dp` group hold the same master weights and moments, and compute the
same updates. With ZeRO-1, each rank owns one slice of every bucket, and keeps the optimizer's state for its slices
only. In a step, for each bucket,

    a reduce-scatter averages the gradients, of which each rank needs its slice only,
    each rank updates the weights of its slice,
    an all-gather sends the updated weights to all ranks.

Bytes of a bfloat16 parameter, held and sent per step (of a float32 parameter, 16 become 8 + 8/n, and 8 stay 8):

                weight   gradient   master weight   two moments   held         sent, times (n - 1)/n
    bucket        2         4            4              8         18           4 + 4, an all-reduce
    zero1         2         4           4/n            8/n        6 + 12/n     4 + 2

An all-reduce is a reduce-scatter followed by an all-gather, so ZeRO-1 only moves the update in between. Gradients
accumulate over all micro-batches in the full buffer, as without ZeRO: with n times smaller buffers, every micro-batch
would have to send its gradients.
"""

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron.collectives import all_gather_single, reduce_scatter_single
from picotron.data_parallel.data_parallel import Bucket, DataParallelBucket, make_buckets
from picotron.data_parallel.guards import check_not_replaced
from picotron.model.placement import OwnedSlice, place, placement, replicas, set_main_grad


def own_slice(buffer: Tensor, group: dist.ProcessGroup) -> slice:
    """Return this rank's slice of a flat buffer that is divided evenly over the ranks of a group."""
    size, rank = len(buffer) // dist.get_world_size(group), dist.get_rank(group)
    return slice(rank * size, (rank + 1) * size)


def start_reduce_to_slices(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to average `own_slice` of a buffer over the group, in place. The rest of the buffer keeps local values.

    Returns:
        The handle to wait for; None for a group of one.
    """
    if dist.get_world_size(group) == 1:
        return None
    own = buffer[own_slice(buffer, group)]
    return reduce_scatter_single(own, buffer, op=dist.ReduceOp.AVG, group=group, async_op=True)


def start_gather_of_slices(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to fill a buffer with `own_slice` of each rank, in place. The result is as in `start_reduce_to_slices`."""
    if dist.get_world_size(group) == 1:
        return None
    return all_gather_single(buffer, buffer[own_slice(buffer, group)], group=group, async_op=True)


def divide(
    parameters: list[nn.Parameter], full: Tensor, weights: Tensor, gradients: Tensor, group: dist.ProcessGroup
) -> None:
    """Divide parameters over the ranks of a group: let the parameters be views of a flat buffer, with the values that
    they have, and let `Placement.owned` and `main_grad` be views of this rank's slices.

    Args:
        full: the buffer.
        weights, gradients: this rank's slices of the buffer's weights and gradients.
    """
    own, rank, offset = own_slice(full, group), dist.get_rank(group), 0
    for parameter in parameters:
        view = full[offset : offset + parameter.numel()].view_as(parameter)
        if parameter.untyped_storage().nbytes() > 0:
            view.copy_(parameter.detach())
        parameter.data = view
        start, stop = (min(max(edge, offset), offset + parameter.numel()) - own.start for edge in (own.start, own.stop))
        place(parameter, owned=OwnedSlice(weights[start:stop], parameter.numel(), offset, len(weights), rank))
        set_main_grad(parameter, gradients[start:stop])
        offset += parameter.numel()


class SlicedBucket(Bucket):
    """A bucket of which each rank owns a slice, see `OwnedSlice`. The weights are also views of a flat buffer.

    Attributes:
        own: this rank's slice of both buffers.
        weights: the buffer of the weights, in their dtype.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, multiple=dist.get_world_size(replicas(parameters[0])))
        self.own = own_slice(self.buffer, self.group)
        self.weights = torch.zeros_like(self.buffer, dtype=parameters[0].dtype)
        divide(parameters, self.weights, self.weights[self.own], self.buffer[self.own], self.group)

    def launch(self) -> None:
        """Start to average this rank's slice of the gradients over the group, while backward continues."""
        self.work = start_reduce_to_slices(self.buffer, self.group)

    def start_gather(self) -> None:
        """Start to send the updated weights of each slice to all ranks."""
        self.work = start_gather_of_slices(self.weights, self.group)


class DataParallelZero1(DataParallelBucket):
    """`DataParallelBucket` with an optimizer that is divided over the ranks."""

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        # A tied matrix has a bucket of its own, so that the ranks of both stages own the same elements, of which they
        # have parts of the gradient.
        tied = [p for p in parameters if placement(p).is_tied]
        others = [p for p in parameters if not placement(p).is_tied]
        groups = others, *([p] for p in tied)
        return [bucket for each in groups for bucket in make_buckets(each, self.bucket_mb, SlicedBucket)]

    def parts(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of one bucket after the other: while the next ones are updated, the new weights are on
        their way to the other ranks.
        """
        for previous, bucket in itertools.pairwise([None, *self.buckets, None]):
            if bucket is not None:
                assert isinstance(bucket, SlicedBucket)
                check_not_replaced(bucket.parameters, bucket.weights, self.module)
                yield bucket.parameters
                bucket.start_gather()
            if previous is not None:  # so at most two are on their way, of which gloo holds copies
                previous.wait()
