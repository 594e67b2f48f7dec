"""Errors for programs with loops of their own, which may not know that a wrapped module has its gradients in
`main_grad`, and averaged only after `finish_grad_sync`. A run of train.py never sees these errors.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.console import UserError
from picotron.model.placement import placement, replicas


class Guard:
    """The checks of one data-parallel wrapper, which holds them as one of its hooks; `remove` ends them.

    Raises:
        UserError: a parameter has a wrapper already, or two ranks start with different weights.
    """

    def __init__(self, wrapper: Any) -> None:
        module, grid = wrapper.module, pgm.process_group_manager
        weights: dict[str, nn.Parameter] = dict(module.named_parameters())
        if wrapped := [name for name, parameter in weights.items() if hasattr(parameter, "main_grad")]:
            raise UserError(
                f"{wrapped[0]} is wrapped for data parallelism already; call close() of that wrapper, or build the module again"
            )
        for group in dict.fromkeys(map(replicas, weights.values())):
            check_equal({name: p for name, p in weights.items() if replicas(p) is group}, group)
        check_equal({name: p for name, p in weights.items() if placement(p).shard is None}, grid.tp_group)
        self.wrapper, self.names, self.grid = wrapper, names_of(module), grid
        self.trained = {parameter for parameter in self.names if parameter.requires_grad}
        self.is_summed = any(placement(p).sum_over or dist.get_world_size(replicas(p)) > 1 for p in self.trained)
        self.replicated = {parameter for parameter in self.trained if dist.get_world_size(replicas(parameter)) > 1}
        self.hooks = [
            register_optimizer_step_pre_hook(self.before_step),
            wrapper.register_forward_pre_hook(self.before_forward),
        ]
        # Called instead of the wrapper's hook, which it then calls: a second hook of each parameter would cost more.
        self.take, wrapper._on_gradient = wrapper._on_gradient, self.on_gradient
        module.zero_grad = ZeroGrad(module, wrapper)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        vars(self.wrapper.module).pop("zero_grad", None)
        self.wrapper.register_forward_pre_hook(refuse)

    def __reduce__(self) -> Any:
        raise UserError(
            "a wrapper cannot be copied or saved; use the module in it, or with ZeRO-3, before it is wrapped"
        )

    def before_forward(self, *_: Any) -> None:
        grid = pgm.process_group_manager
        if grid is not self.grid and str(grid) != str(self.grid):
            raise UserError(
                f"a model in the layout {self.grid} cannot run in {grid}; use one layout in a process at a time"
            )

    def on_gradient(self, parameter: Tensor) -> None:
        wrapper, bucket = self.wrapper, self.wrapper.bucket_of.get(parameter)
        is_late = wrapper.is_averaged and self.is_summed  # of all gradients, because the first one resets the flag
        is_ready = parameter in self.replicated and bucket and parameter not in bucket.pending_parameters
        if parameter.grad is not None and (is_late or is_ready):
            raise UserError(
                f"{self.names[parameter]} has a gradient after the gradients of this step were averaged; call zero_grad "
                f"of the wrapper before the next backward, and finish_grad_sync, clip_grad_norm or step only after the last one"
                if is_late
                else f"{self.names[parameter]} has a second gradient after it was ready to be averaged; set "
                f"require_backward_grad_sync to False for all backwards but the last one, call finish_grad_sync after it, and "
                f"use_reentrant=False in checkpoints"
            )
        self.take(parameter)

    def before_step(self, optimizer: Any, *_: Any) -> None:
        groups, is_ours = optimizer.param_groups, getattr(optimizer, "model", None) is self.wrapper
        masters = optimizer.masters if is_ours else {}
        mine = [p for group in groups for p in group["params"] if p in self.names and masters.get(p) is not p]
        if mine and all(parameter.grad is None for parameter in mine):
            raise UserError(
                f"{type(optimizer).__name__} finds no gradient of {self.names[mine[0]]}: those of a wrapped module are in "
                f"main_grad; use picotron.optimizer.AdamW, whose groups hold its `masters[parameter]`. Without ZeRO, you can "
                f"also set each grad to main_grad(parameter) after finish_grad_sync, and clear all by zero_grad of the wrapper, "
                f"not of the optimizer"
            )
        self.is_summed |= bool(mine)  # zero_grad of torch's optimizers does not clear main_grad
        if mine or is_ours:
            self.check_trained()

    def check_trained(self) -> None:
        """Raise UserError if a parameter has been frozen, unfrozen or added since its module was wrapped."""
        parameters = self.wrapper.module.parameters()
        if changed := [p for p in parameters if p.requires_grad != (p in self.trained)]:
            how = ("unfrozen" if changed[0] in self.names else "added") if changed[0].requires_grad else "frozen"
            raise UserError(
                f"{names_of(self.wrapper.module)[changed[0]]} was {how} after its module was wrapped for data parallelism; do "
                f"that before, for the whole run"
            )


def guard_of(wrapper: Any) -> Guard:
    return next(hook for hook in wrapper.hooks if isinstance(hook, Guard))


def refuse(*_: Any) -> None:
    raise UserError("this data-parallel wrapper is closed; wrap the module again")


class ZeroGrad:
    """`zero_grad` of a wrapped module: that of its wrapper. A copy of the module has that of its class."""

    def __init__(self, module: nn.Module, wrapper: nn.Module) -> None:
        self.module, self.wrapper = module, wrapper

    def __call__(self, set_to_none: bool = True) -> None:
        self.wrapper.zero_grad()

    def __reduce__(self) -> Any:
        return functools.partial, (type(self.module).zero_grad, self.module)


def names_of(module: nn.Module) -> dict[Tensor, str]:
    """Return the names of a module's parameters."""
    return {parameter: name for name, parameter in module.named_parameters()}


def check_not_replaced(parameters: Iterable[Tensor], buffer: Tensor, module: nn.Module) -> None:
    """Raise UserError if the data of a module's parameter are no longer in a buffer, such as after
    `parameter.data = tensor`: the optimizer would go on with those in the buffer.
    """
    memory = buffer.untyped_storage()._cdata
    for parameter in parameters:
        if parameter.untyped_storage()._cdata != memory:
            raise UserError(
                f"{names_of(module).get(parameter, 'a weight')}.data has been replaced, but ZeRO keeps the weights in its own buffers; change "
                f"weights before the module is wrapped, or, with zero1, in place, by copy_ in torch.no_grad()"
            )


def check_equal(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Check that every rank of a group has the same tensors, by a sum of the bits of each. Tensors without values, such
    as those on the meta device, are skipped.

    Raises:
        UserError: a tensor differs, with its name.
    """
    held = [name for name, x in tensors.items() if x.device.type != "meta" and x.untyped_storage().nbytes() > 0]
    if dist.get_world_size(group) == 1 or not held:
        return
    sums = []
    for x in (tensors[name].detach() for name in held):
        bits = x.flatten().view(getattr(torch, f"int{8 * min(x.itemsize, 8)}"))
        # Integers that wrap around have the same sum in any order, and in their own dtype it is fast.
        sums.append(bits.sum(dtype=bits.dtype).to(tensors[held[0]].device, torch.int64))
    largest = torch.stack([torch.stack(sums), -torch.stack(sums)])
    all_reduce(largest, group, dist.ReduceOp.MAX)
    for name, differs in zip(held, (largest[0] != -largest[1]).tolist(), strict=True):  # waits for the GPU only once
        if differs:
            raise UserError(
                f"{name} differs between ranks {dist.get_process_group_ranks(group)}, which must start with equal weights; "
                f"load the same file on all of them, or call torch.manual_seed before the model is built"
            )
