"""Selective recomputation: keep what is expensive to compute, the results of products and of attention, and compute
again what is cheap but large, the norms and the gated activation (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_cheap_results(model: nn.Module) -> None:
    """Keep neither the results of norms nor those of activations in the layers of a Llama.

    Call it after tensor and context parallelism, which replace modules, because it registers hooks on them.
    """
    for layer in model.modules():
        leave_out: Callable[[], None] | None = getattr(layer, "recompute_cheap_results", None)
        if leave_out is not None:
            leave_out()


def recompute_result(owner: nn.Module, name: str, user: nn.Module) -> None:
    """Let the result of a method or function, `owner.name`, be computed again in backward. Only its inputs are kept.

    The result's memory is empty from the end of the forward of `user`, a module whose first argument it is, until the
    gradient of this module's output arrives. torch.compile decides by itself what to compute again, so compiled code
    is left alone.
    """
    fn: Callable[..., Tensor] = getattr(owner, name)
    latest: list[Any] = [None, ()]  # the last result, until `user` gets it, and its inputs

    def compute(*inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return fn(*inputs)
        latest[:] = checkpoint(fn, *inputs, use_reentrant=False, preserve_rng_state=False), inputs
        return latest[0]

    def empty(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if torch.compiler.is_compiling() or latest[0] is not arguments[0]:
            return
        (result, inputs), latest[:] = latest, (None, ())
        if not output.requires_grad or not result.requires_grad:
            return
        memory = result.untyped_storage()
        emptied = [(memory, memory.nbytes(), inputs)]  # the hook lives as long as the graph, these only until it runs

        def fill(_: Tensor) -> None:
            while emptied:
                memory, size, inputs = emptied.pop()
                memory.resize_(size)
                with torch.no_grad():
                    memory.copy_(fn(*inputs).untyped_storage())

        memory.resize_(0)
        output.register_hook(fill)

    setattr(owner, name, compute)
    user.register_forward_hook(empty)
