"""Data parallelism: every rank has all the weights and its own part of the batch; gradients are averaged.

Each parameter gets a `main_grad` of float32 or wider that gradients are added to, micro-batch after micro-batch, and
that the optimizer reads. The average is over `cp_dp_group`: context-parallel ranks hold the same weights too.

`DataParallelNaive` shows the idea, `DataParallelBucket` makes it fast (Li et al. 2020, arXiv:2006.15704).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.data_parallel.bucket import Bucket, make_buckets

Groups = Mapping[int, Sequence[nn.Parameter]]


class DataParallel(nn.Module):
    """What both versions share: gradients are added to `main_grad`, and full buckets are handed to `_reduce` in order.

    A step calls `finish_grad_sync` when all its backwards are done. They do not wait themselves: under pipeline
    parallelism, other stages want their gradients while this stage's are still being averaged.

    Args:
        groups: by number, the parameters whose gradients are complete together, see `start_grad_sync`; by default all.

    Attributes:
        require_backward_grad_sync: does the next backward reduce the gradients? With several micro-batches only the
            last one should: the sum is reduced once. Every rank has to agree.
    """

    def __init__(self, module: nn.Module, bucket_mb: float, groups: Groups | None = None) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.buckets_of: dict[int, list[Bucket]] = {}
        for number, group in ({0: list(module.parameters())} if groups is None else groups).items():
            # Backward meets the last layers first, so this is about the order in which gradients get ready.
            parameters = [p for p in group if p.requires_grad][::-1]
            self.buckets_of[number] = make_buckets(parameters, pgm.process_group_manager.cp_dp_group, bucket_mb)
        self.buckets = [bucket for buckets in self.buckets_of.values() for bucket in buckets]
        self.bucket_of: dict[Tensor, Bucket] = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.waiting = list(self.buckets)  # to be reduced in this step
        for parameter in self.bucket_of:
            # The hook itself must not refer to `self`: the garbage collector does not look into this kind of hook, and
            # would never free the model and its gradients.
            parameter.accumulate = self._accumulate
            parameter.register_post_accumulate_grad_hook(_accumulate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context only accumulate."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _accumulate(self, parameter: nn.Parameter) -> None:
        """Runs when autograd has summed up `parameter.grad` for this backward (once, also for a tied weight)."""
        if parameter.grad is None:  # a backward that defers weight gradients calls this before there is one
            return
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if self.require_backward_grad_sync:
            self._ready(parameter)

    def _ready(self, parameter: nn.Parameter) -> None:
        missing = self.bucket_of[parameter].missing
        assert parameter in missing, "a second backward reduces before finish_grad_sync"
        missing.remove(parameter)
        # Always in order: a message meets its partner on other ranks by its place in the sequence, and ranks may
        # differ in which parameters their part of the batch uses.
        while self.waiting and not self.waiting[0].missing:
            self._reduce(self.waiting.pop(0))

    def start_grad_sync(self, group: int) -> None:
        """Begin to average the gradients of a group, which are complete. For backwards that do not reduce themselves:
        a pipeline schedule says when each stage's turn is. Every rank has to agree.
        """
        for bucket in self.buckets_of[group]:
            self.waiting.remove(bucket)
            self._reduce(bucket)

    def finish_grad_sync(self) -> None:
        """Wait until every gradient is the average. What got none in the last backward is reduced now: it may hold one
        of an earlier micro-batch.
        """
        while self.waiting:
            self._reduce(self.waiting.pop(0))
        for bucket in self.buckets:
            bucket.wait()
            bucket.reset()
        self.waiting = list(self.buckets)

    def _reduce(self, bucket: Bucket) -> None:
        raise NotImplementedError


def _accumulate(parameter: nn.Parameter) -> None:
    parameter.accumulate(parameter)


class DataParallelNaive(DataParallel):
    """Averages each gradient by a message of its own, and waits until it is done."""

    def __init__(self, module: nn.Module, groups: Groups | None = None) -> None:
        super().__init__(module, 0.0, groups)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.launch()
        bucket.wait()


class DataParallelBucket(DataParallel):
    """Averages gradients in buckets of `bucket_mb` megabytes, while backward computes the next ones.

    A message has a fixed cost, so few large ones beat many small ones; but a bucket leaves only when it is full, so
    several medium ones overlap better than a single huge one.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0, groups: Groups | None = None) -> None:
        super().__init__(module, bucket_mb, groups)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.launch()
