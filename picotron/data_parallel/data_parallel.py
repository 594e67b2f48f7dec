"""Data parallelism: every rank holds all weights and a part of the batch, and gradients are averaged over the ranks.

Each parameter gets a `main_grad`, a buffer in float32 or wider, in which gradients accumulate over micro-batches and
which the optimizer reads. The average is over `cp_dp_group`, because context-parallel ranks also hold the same weights.

`DataParallelNaive` shows the idea; `DataParallelBucket` makes it fast (Li et al. 2020, arXiv:2006.15704). With both,
all ranks hold the same optimizer state, which `zero1` shards over them.
"""

import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce, check_equal
from picotron.console import UserError
from picotron.data_parallel.wrappers import check_not_wrapped, check_optimizer, wrapper_by_parameter, zero_gradients
from picotron.model.placement import place, placement, set_main_grad, sum_partial_gradients


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


def make_buckets(
    parameters: list[nn.Parameter], group: dist.ProcessGroup, megabytes: float, kind: type[Bucket] = Bucket
) -> list[Bucket]:
    """Fill buckets of at least `megabytes` MiB, except the last one of a kind, in the given order. (With an upper limit
    instead, a norm's weight between two large matrices would have a bucket to itself.)
    """

    def kind_of(parameter: nn.Parameter) -> tuple[Any, ...]:
        return parameter.dtype, parameter.device, placement(parameter).stage

    buckets: list[Bucket] = []
    filling: list[nn.Parameter] = []
    size = 0.0
    for parameter in parameters:
        if filling and kind_of(parameter) != kind_of(filling[0]):
            buckets.append(kind(filling, group))
            filling, size = [], 0.0
        filling.append(parameter)
        size += parameter.numel() * accumulation_dtype(parameter).itemsize / 2**20
        if size >= megabytes:
            buckets.append(kind(filling, group))
            filling, size = [], 0.0
    return [*buckets, kind(filling, group)] if filling else buckets


MIB_PER_RANK = 4.0  # Megatron-core's default buckets have as much: a million float32 gradients per data-parallel rank


class DataParallel(nn.Module):
    """Base of all versions: accumulates gradients in `main_grad` and passes complete buckets to `_reduce`, in order.
    (ZeRO-3 has units instead of buckets.)

    After the backwards of a step comes `finish_grad_sync`, which clipping and the optimizer call, too. The backwards
    themselves do not wait for the reductions: in a pipeline, the previous stage can run its backward while this stage's
    gradients are still being averaged.

    Args:
        module: any module. Ranks that hold the same weights must start with equal ones, because only gradients are
            averaged.
        bucket_mb: minimum size of a bucket in MiB.

    Raises:
        UserError: two ranks start with different weights, or a parameter has a wrapper already.

    Attributes:
        require_backward_grad_sync: whether the next backward reduces the gradients. With several micro-batches, only
            the last backward should, so that the sum is reduced once. The flag must be the same on all ranks of a
            `cp_dp` group. In a group of one rank, there is nothing to reduce, so it has no effect.
        is_averaged: whether the gradients are those of the whole step: after `finish_grad_sync`, until the next
            gradient or `zero_grad`.
        trained: parameters that were not frozen when the module was wrapped; only these have a gradient.
        names: names of the module's parameters.
        hooks: handles of all hooks, see `close`.
    """

    def __init__(self, module: nn.Module, bucket_mb: float) -> None:
        super().__init__()
        weights, grid = dict(module.named_parameters()), pgm.process_group_manager
        check_not_wrapped(weights)
        check_equal(weights, grid.cp_dp_group)
        check_equal({name: p for name, p in weights.items() if placement(p).shard is None}, grid.tp_group)
        self.module, self.bucket_mb, self.layout = module, bucket_mb, str(grid)
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in weights.items()}
        self.has_replicas = grid.cp_dp_world_size > 1
        self.require_backward_grad_sync = self.has_replicas
        self.is_averaged = self.is_closed = False
        # Gradients of a pipeline stage are complete together, see `start_grad_sync`. Backward reaches the last layers
        # first, so in this order buckets complete one after the other.
        trained = [p for p in module.parameters() if p.requires_grad][::-1]
        self.trained = set(trained)
        self.buckets = self._make_buckets(sorted(trained, key=lambda p: placement(p).stage))
        self.bucket_by_parameter: dict[Tensor, Bucket] = {
            p: bucket for bucket in self.buckets for p in bucket.parameters
        }
        self.pending_buckets = list(self.buckets)  # not reduced yet in this step
        self.hooks: list[Any] = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: check_optimizer(self.names, optimizer))
        ]
        self._hold(self.bucket_by_parameter)
        module.zero_grad = functools.partial(zero_gradients, module)  # type: ignore[method-assign]

    def _hold(self, parameters: Collection[Tensor]) -> None:
        """Be the wrapper of some parameters, and take their gradients."""
        for parameter in parameters:
            wrapper_by_parameter[parameter] = self
            if parameter.requires_grad:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def close(self) -> None:
        """Undo the wrapping. The module keeps its weights, and may be wrapped again, with a new optimizer. All ranks
        call this, because ZeRO-3 gathers the weights.
        """
        self.unhook()

    def unhook(self) -> None:
        """Remove the hooks and marks of this wrapper, on this rank alone. The garbage collector does not look into
        hooks, so they would keep the model and its gradients in memory.
        """
        self.is_closed = True
        for hook in self.hooks:
            hook.remove()
        for parameter in filter(lambda p: wrapper_by_parameter.get(p) is self, self.names):
            del wrapper_by_parameter[parameter]
            vars(parameter).pop("main_grad", None)
            place(parameter, owned=None)
        self.module.__dict__.pop("zero_grad", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_closed:
            raise UserError("this data-parallel wrapper is closed; wrap the module again")
        if self.layout != str(grid := pgm.process_group_manager):
            raise UserError(
                f"a model in the layout {self.layout} cannot run in {grid}; use one layout in a process at a time"
            )
        return self.module(*args, **kwargs)

    def backward(self, input_tensor: Tensor | None, output_tensor: Any, output_tensor_grad: Tensor | None) -> Any:
        """Run the backward of a pipeline stage, see `PipelineParallel.backward`."""
        stage: Any = self.module
        return stage.backward(input_tensor, output_tensor, output_tensor_grad)

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        return make_buckets(parameters, pgm.process_group_manager.cp_dp_group, self.bucket_mb)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Take `parameter.grad`. Autograd calls this once per backward, also for a tied weight."""
        if parameter.grad is None:  # a backward that defers this gradient also calls the hook
            return
        is_summed = self.has_replicas or placement(parameter).sum_over or placement(parameter).is_tied
        if self.is_averaged and is_summed:
            raise UserError(
                f"{self.names[parameter]} has a gradient after the gradients of this step were averaged; call zero_grad "
                f"before the next backward, and finish_grad_sync, clip_grad_norm or step only after the last one"
            )
        self.is_averaged = False
        self._accumulate(parameter)

    def _accumulate(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.bucket_by_parameter[parameter].gradients[parameter].add_(gradient)
        if self.require_backward_grad_sync and self.has_replicas:
            self._ready(parameter)

    def _ready(self, parameter: Tensor) -> None:
        pending = self.bucket_by_parameter[parameter].pending_parameters
        if parameter not in pending:
            raise UserError(
                f"{self.names[parameter]} has a second gradient after it was ready to be averaged; set "
                f"require_backward_grad_sync to False for all backwards but the last one, call finish_grad_sync after it, and "
                f"use_reentrant=False in checkpoints"
            )
        pending.remove(parameter)
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
        """Wait until every gradient is the average, and sum those that are partial, see `sum_partial_gradients`, or of
        which other pipeline stages have a part, see `PipelineParallel.sum_tied_gradients`. If that is done, do nothing.

        Buckets that are still pending are reduced first: a parameter that got no gradient in the last backward may hold
        one from an earlier micro-batch.

        Raises:
            UserError: a parameter has been frozen or unfrozen since it was wrapped.
        """
        if self.is_averaged:
            return
        self.check_trained()
        while self.pending_buckets:
            self._reduce(self.pending_buckets.pop(0))
        self._end_reductions()
        sum_partial_gradients(self.module)
        sum_tied: Any = getattr(self.module, "sum_tied_gradients", None)
        if sum_tied is not None:
            sum_tied()
        self.is_averaged = True

    def check_trained(self) -> None:
        """Raise UserError if a parameter has been frozen or unfrozen since it was wrapped."""
        for parameter, name in self.names.items():
            if parameter.requires_grad != (parameter in self.trained):
                change = "unfrozen" if parameter.requires_grad else "frozen"
                raise UserError(
                    f"{name} was {change} after its module was wrapped for data parallelism; set requires_grad before, for the "
                    f"whole run"
                )

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
