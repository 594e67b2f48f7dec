"""The data-parallel wrapper of each parameter, for programs with loops of their own.

The gradients of a wrapped module are in `main_grad`, and are averages only after `finish_grad_sync`. A program may not
know that: it calls the optimizer's step, makes an optimizer of the inner module, or wraps the module again. So each
parameter has one wrapper at a time, and all that reads or clears the gradients of a model asks its wrappers.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from picotron.console import UserError

if TYPE_CHECKING:
    from picotron.data_parallel.data_parallel import DataParallel

wrapper_by_parameter: MutableMapping[Tensor, "DataParallel"] = WeakTensorKeyDictionary()


def wrappers_of(model: nn.Module) -> list["DataParallel"]:
    """Return the wrappers of a model's parameters: itself, or modules inside of it or around it."""
    found = (wrapper_by_parameter.get(parameter) for parameter in model.parameters())
    return list(dict.fromkeys(wrapper for wrapper in found if wrapper is not None))


def complete_gradients(model: nn.Module) -> None:
    """Finish the reductions of this step's gradients, unless the loop has called `finish_grad_sync`. All that reads the
    `main_grad`s of a model calls this first.
    """
    for wrapper in wrappers_of(model):
        wrapper.finish_grad_sync()


def zero_gradients(model: nn.Module) -> None:
    """Set the gradients of a model, and all others in its wrappers, to zero."""
    for wrapper in wrappers_of(model):
        wrapper.zero_grad()


def check_not_wrapped(weights: Mapping[str, Tensor]) -> None:
    """Raise UserError if a parameter has a wrapper, which would take its gradients from another one."""
    for name, parameter in weights.items():
        if parameter in wrapper_by_parameter:
            raise UserError(
                f"{name} is wrapped for data parallelism already; call close() of that wrapper, or build the module again"
            )


def check_optimizer(names: Mapping[Tensor, str], optimizer: Any) -> None:
    """Raise UserError if an optimizer, which is about to step, finds no gradients of the parameters in `names`."""
    if getattr(optimizer, "reads_main_grad", False):
        return
    mine = [p for group in optimizer.param_groups for p in group["params"] if p in names]
    if mine and all(parameter.grad is None for parameter in mine):
        raise UserError(
            f"{type(optimizer).__name__} finds no gradient of {names[mine[0]]}: those of a wrapped module are in main_grad; "
            f"use picotron.optimizer.optimizer.AdamW, or set each grad to main_grad(parameter) after finish_grad_sync"
        )


def check_not_replaced(parameters: Iterable[Tensor], buffer: Tensor, names: Mapping[Tensor, str]) -> None:
    """Raise UserError if the data of a parameter are no longer in a buffer, such as after `parameter.data = tensor`:
    the optimizer would go on with those in the buffer.
    """
    memory = buffer.untyped_storage()._cdata
    for parameter in parameters:
        if parameter.untyped_storage()._cdata != memory:
            raise UserError(
                f"{names[parameter]}.data has been replaced, but ZeRO keeps the weights in its own buffers; change weights "
                f"before the module is wrapped, or, with zero1, in place, by copy_ in torch.no_grad()"
            )
