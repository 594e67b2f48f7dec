"""Data parallelism: every rank has all the weights and its own part of the batch; gradients are averaged.

Each parameter gets a `main_grad` of float32 or wider that gradients are added to, micro-batch after micro-batch, and
that the optimizer reads. The average is over `cp_dp_group`: context-parallel ranks hold the same weights too.

`DataParallelNaive` shows the idea, `DataParallelBucket` makes it fast (Li et al. 2020, arXiv:2006.15704).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from picotron import process_group_manager as pgm
from picotron.data_parallel.bucket import Bucket, main_grad_dtype, make_buckets
from picotron.utils import all_reduce


class DataParallel(nn.Module):
    """What both versions share: gradients go from `grad` to `main_grad`, and `_gradient_ready` decides what then.

    Attributes:
        require_backward_grad_sync: does the next backward reduce the gradients? With several micro-batches only the
            last one should: the sum is reduced once. Every rank has to agree.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.group = pgm.process_group_manager.cp_dp_group
        self._finish_is_queued = False
        # Backward meets the last layers first, so this is about the order in which gradients get ready. They are
        # always reduced in this order: a message meets its partner on other ranks by its place in the sequence, and
        # ranks may differ in which parameters their batch uses.
        self.parameters_in_order = [p for p in module.parameters() if p.requires_grad][::-1]
        for parameter in self.parameters_in_order:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

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

    def _accumulate(self, parameter: Tensor) -> None:
        """Runs when autograd has summed up `parameter.grad` for this backward (once, also for a tied weight)."""
        if parameter.grad is None:  # a backward that defers weight gradients calls this before there is one
            return
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if self.require_backward_grad_sync:
            if not self._finish_is_queued:
                # When this backward is over: what got no gradient in it may still hold some of an earlier micro-batch.
                Variable._execution_engine.queue_callback(self._finish)
                self._finish_is_queued = True
            self._gradient_ready(parameter)

    def _finish(self) -> None:
        self._finish_is_queued = False
        self._reduce_the_rest()

    def _gradient_ready(self, parameter: Tensor) -> None:
        raise NotImplementedError

    def _reduce_the_rest(self) -> None:
        raise NotImplementedError


class DataParallelNaive(DataParallel):
    """Averages each gradient by a message of its own, as soon as it is ready. Backward waits for every one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for parameter in self.parameters_in_order:
            parameter.main_grad = torch.zeros_like(parameter, dtype=main_grad_dtype(parameter))
        self.ready: set[Tensor] = set()
        self.reduced = 0  # so many of parameters_in_order

    def _gradient_ready(self, parameter: Tensor) -> None:
        self.ready.add(parameter)
        while self.reduced < len(self.parameters_in_order) and self.parameters_in_order[self.reduced] in self.ready:
            self._reduce_next()

    def _reduce_next(self) -> None:
        all_reduce(self.parameters_in_order[self.reduced].main_grad, self.group, dist.ReduceOp.AVG)
        self.reduced += 1

    def _reduce_the_rest(self) -> None:
        while self.reduced < len(self.parameters_in_order):
            self._reduce_next()
        self.ready.clear()
        self.reduced = 0


class DataParallelBucket(DataParallel):
    """Averages gradients in buckets of `bucket_mb` megabytes, while backward computes the next ones.

    A message has a fixed cost, so few large ones beat many small ones; but a bucket leaves only when it is full, so
    several medium ones overlap better than a single huge one.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0) -> None:
        super().__init__(module)
        self.buckets = make_buckets(self.parameters_in_order, self.group, bucket_mb)
        self.bucket_of: dict[Tensor, Bucket] = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.launched = 0

    def _gradient_ready(self, parameter: Tensor) -> None:
        self.bucket_of[parameter].missing.discard(parameter)
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        self.buckets[self.launched].launch()
        self.launched += 1

    def _reduce_the_rest(self) -> None:
        while self.launched < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            bucket.wait()
            bucket.reset()
        self.launched = 0
