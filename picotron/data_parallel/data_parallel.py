"""Data parallelism: every rank holds all weights and a part of the batch, and gradients are averaged over the ranks.

Each parameter gets a `main_grad`, a buffer in float32 or wider, in which gradients accumulate over micro-batches and
which the optimizer reads. The average is over `cp_dp_group`, because context-parallel ranks also hold the same weights,
unless a parameter's `Placement` names other ranks.

`DataParallelNaive` shows the idea; `DataParallelBucket` makes it fast (Li et al. 2020, arXiv:2006.15704). With both,
all ranks hold the same optimizer state. (ZeRO shards it over them, see workbench/variants.)
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.data_parallel.guards import Guard
from picotron.model.placement import place, placement, replicas, set_main_grad, sum_partial_gradients


class Bucket:
    """Parameters whose gradients are views of one flat buffer, and the reduction of that buffer.

    Args:
        parameters: parameters of one kind, see `make_buckets`.
        multiple: number by which the size of the buffer is divisible; the buffer is padded.

    Attributes:
        group: the ranks to average over.
        gradients: the views, in which gradients accumulate; here they are also the `main_grad`s.
        pending_parameters: parameters whose gradient is not complete yet in a backward that reduces.
    """

    def __init__(self, parameters: list[nn.Parameter], multiple: int = 1) -> None:
        self.parameters, self.group = parameters, replicas(parameters[0])
        first, sizes = parameters[0], [p.numel() for p in parameters]
        padded = -(-sum(sizes) // multiple) * multiple
        self.buffer = torch.zeros(padded, dtype=accumulation_dtype(first), device=first.device)
        views = self.buffer[: sum(sizes)].split(sizes)
        self.gradients: dict[Tensor, Tensor] = {p: v.view_as(p) for p, v in zip(parameters, views, strict=True)}
        for parameter, gradient in self.gradients.items():
            set_main_grad(parameter, gradient)
        self.work: dist.Work | None = None
        self.reset()

    def reset(self) -> None:
        """Prepare for the next backward that reduces."""
        self.pending_parameters: set[Tensor] = set(self.parameters)

    def launch(self) -> None:
        """Start to average the buffer over the group, while backward continues."""
        self.work = all_reduce(self.buffer, self.group, dist.ReduceOp.AVG, async_op=True)

    def wait(self) -> None:
        """Wait for the average, if it is on its way."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def make_buckets(parameters: list[nn.Parameter], megabytes: float, bucket: type[Bucket] = Bucket) -> list[Bucket]:
    """Fill buckets of at least `megabytes` MiB, except the last one of a kind, in the given order. (With an upper limit
    instead, a norm's weight between two large matrices would have a bucket to itself.)

    The parameters of a bucket are of one kind: they have the same dtype, device, pipeline stage and replicas.
    """
    filling: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
    buckets = []
    for p in parameters:
        kind = p.dtype, p.device, placement(p).stage, replicas(p)
        filling[kind].append(p)
        if sum(each.numel() for each in filling[kind]) * accumulation_dtype(p).itemsize >= megabytes * 2**20:
            buckets.append(bucket(filling.pop(kind)))
    return buckets + [bucket(rest) for rest in filling.values()]


MIB_PER_RANK = 4.0  # Megatron-core's default buckets have as much: a million float32 gradients per data-parallel rank


class DataParallel(nn.Module):
    """Base of all versions: accumulates gradients in `main_grad` and passes complete buckets to `_reduce`, in order.

    After the backwards of a step comes `finish_grad_sync`, which clipping and the optimizer call, too. The backwards
    themselves do not wait for the reductions: in a pipeline, the previous stage can run its backward while this stage's
    gradients are still being averaged.

    Args:
        module: any module. Ranks that hold the same weights must start with equal ones, because only gradients are
            averaged.
        bucket_mb: minimum size of a bucket in MiB.

    Attributes:
        require_backward_grad_sync: whether the next backward reduces the gradients. With several micro-batches, only
            the last backward should, so that the sum is reduced once. The flag must be the same on all ranks that hold
            the same weights. In a group of one rank, there is nothing to reduce, so it has no effect.
        is_averaged: whether the gradients are those of the whole step: after `finish_grad_sync`, until the next
            gradient or `zero_grad`.
        hooks: handles of all hooks, see `close`.
    """

    def __init__(self, module: nn.Module, bucket_mb: float) -> None:
        super().__init__()
        self.module, self.bucket_mb = module, bucket_mb
        self.require_backward_grad_sync = pgm.process_group_manager.cp_dp_world_size > 1
        self.is_averaged = False
        self.hooks: list[Any] = [Guard(self)]
        # Gradients of a pipeline stage are complete together, see `start_grad_sync`. Backward reaches the last layers
        # first, so in this order buckets complete one after the other.
        trained = [p for p in module.parameters() if p.requires_grad][::-1]
        self.buckets = self._make_buckets(sorted(trained, key=lambda p: placement(p).stage))
        self.bucket_of: dict[Tensor, Bucket] = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.pending_buckets = list(self.buckets)  # not reduced yet in this step
        self._take_gradients_of(self.bucket_of)

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        return make_buckets(parameters, self.bucket_mb)

    def _take_gradients_of(self, parameters: Iterable[Tensor]) -> None:
        self.hooks += [each.register_post_accumulate_grad_hook(self._on_gradient) for each in parameters]

    def close(self) -> None:
        """Undo the wrapping. The module keeps its weights, and may be wrapped again, with a new optimizer. All ranks
        call this, because ZeRO-3 gathers the weights.
        """
        self.unhook()

    def unhook(self) -> None:
        """Remove the hooks and marks of this wrapper, on this rank alone. The garbage collector does not look into
        hooks, so they would keep the model and its gradients in memory.
        """
        for hook in self.hooks:
            hook.remove()
        for parameter in self.module.parameters():
            vars(parameter).pop("main_grad", None)
            place(parameter, owned=None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, input_tensor: Tensor | None, output_tensor: Any, output_tensor_grad: Tensor | None) -> Any:
        """Run the backward of a pipeline stage, see `PipelineParallel.backward`."""
        return self.module.backward(input_tensor, output_tensor, output_tensor_grad)  # type: ignore[operator]

    def _on_gradient(self, parameter: Tensor) -> None:
        """Take `parameter.grad`. Autograd calls this once per backward, also for a tied weight."""
        if parameter.grad is not None:  # a backward that defers this gradient also calls the hook
            self.is_averaged = False
            gradient, parameter.grad = parameter.grad, None
            if (scale := placement(parameter).gradient_scale) != 1:
                gradient = gradient * scale
            self._accumulate(parameter, gradient)

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        bucket = self.bucket_of[parameter]
        bucket.gradients[parameter].add_(gradient)
        if self.require_backward_grad_sync:
            bucket.pending_parameters.discard(parameter)
            # Always in order: collectives of different ranks are matched by their place in the sequence, and ranks may
            # differ in which parameters their part of the batch uses.
            while self.pending_buckets and not self.pending_buckets[0].pending_parameters:
                self._reduce(self.pending_buckets.pop(0))

    def gradient_buffers(self) -> list[Tensor]:
        """Return the tensors in which gradients accumulate."""
        return [bucket.buffer for bucket in self.buckets]

    def start_grad_sync(self, stage: int) -> None:
        """Start to average the complete gradients of a stage. Pipeline schedules, whose backwards do not reduce, call
        this when it is the stage's turn, in the same order on every rank.
        """
        for bucket in [each for each in self.pending_buckets if placement(each.parameters[0]).stage == stage]:
            self.pending_buckets.remove(bucket)
            self._reduce(bucket)

    def finish_grad_sync(self) -> None:
        """Wait until every gradient is the average, and sum the partial ones, see `sum_partial_gradients`. If that is
        done, do nothing.

        Buckets that are still pending are reduced first: a parameter that got no gradient in the last backward may hold
        one from an earlier micro-batch.
        """
        if self.is_averaged:
            return
        while self.pending_buckets:
            self._reduce(self.pending_buckets.pop(0))
        self._end_reductions()
        sum_partial_gradients(self.module)
        self.is_averaged = True

    def parts(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters that `AdamW.step` updates together; here, all of them."""
        yield list(self.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero, wherever they are: also those of a step that was given up, whose reductions may
        have begun. `AdamW.zero_grad` calls this.
        """
        super().zero_grad()
        self._end_reductions()
        for buffer in self.gradient_buffers():
            buffer.zero_()
        self.is_averaged = False

    def _end_reductions(self) -> None:
        """Wait for the reductions that have begun, and prepare for those of the next step."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.reset()
        self.pending_buckets = list(self.buckets)

    def _reduce(self, bucket: Bucket) -> None:
        raise NotImplementedError


class DataParallelNaive(DataParallel):
    """Averages each gradient in a separate collective and waits for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 0.0)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.launch()
        bucket.wait()


class DataParallelBucket(DataParallel):
    """Averages gradients in buckets of at least `bucket_mb` MiB, while backward computes the next ones.

    A collective has a fixed cost, so a few large ones beat many small ones; but a bucket is sent only when it is full,
    so several medium-sized buckets overlap better than one huge bucket. A ring of n ranks sends a bucket in n parts, so
    the default grows with n: 25 MiB, as in DistributedDataParallel, but at least MIB_PER_RANK for each rank.
    """

    def __init__(self, module: nn.Module, bucket_mb: float | None = None) -> None:
        default = max(25.0, MIB_PER_RANK * pgm.process_group_manager.cp_dp_world_size)
        super().__init__(module, default if bucket_mb is None else bucket_mb)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.launch()
