"""Selective recomputation: keep what is expensive to compute, the results of products and of attention, and compute
again what is cheap but large, the norms and the gated activation (Korthikanti et al. 2022, arXiv:2205.05198).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from picotron.model.llama import DecoderLayer, PostNormLayer


def recompute_cheap_results(model: nn.Module, splits_mlp: bool) -> None:
    """Keep neither the results of norms nor those of activations in the layers of a Llama.

    Call it after tensor and context parallelism, which replace modules, because it registers hooks on them.

    Args:
        splits_mlp: whether torch.compile cannot compile the MLP as a whole. (It may be unable to compile attention as a
            whole: not across ranks, and not with packed documents.)
    """
    for layer in model.modules():
        if not isinstance(layer, (DecoderLayer, PostNormLayer)):
            continue
        used: list[torch.UntypedStorage] = []
        if isinstance(layer, DecoderLayer):  # nothing keeps the norms of a PostNormLayer, which are added
            recompute_result(layer.input_layernorm, layer.self_attn, True, used)
            recompute_result(layer.post_attention_layernorm, layer.mlp, splits_mlp, used)
        blocks: Any = layer.mlp.modules()  # itself, or its experts
        for block in blocks:
            if hasattr(block, "act_fn"):
                down = block.down_proj if block is layer.mlp else block.down
                recompute_result(block.act_fn, down, splits_mlp, used)
        layer.register_forward_hook(functools.partial(empty, used))


@torch.compiler.disable
def empty(used: list[torch.UntypedStorage], *_: Any) -> None:
    """Free the memory of the results that a layer has used. Until it returns, hooks on its modules can read them."""
    while used:
        used.pop().resize_(0)


def recompute_result(owner: nn.Module, user: nn.Module, splits: bool, used: list[torch.UntypedStorage]) -> None:
    """Let the result of a module, `owner`, be computed again in backward. Only its inputs are kept.

    The result's memory is empty from the end of the layer's forward until the gradient of the output of `user` arrives,
    a module whose first argument it is. Where torch.compile compiles all of this together, it does the same.

    Args:
        splits: whether parts of `user` are not compiled. These would keep the result, if compiled code returned it, so
            neither the function nor the hook on `user` is compiled.
        used: list that gets the memory of the result after it was used.
    """
    fn: Callable[..., Tensor] = owner.forward
    latest: list[Any] = [None, ()]  # the last result, until `user` gets it, and its inputs

    @functools.wraps(fn)
    def compute(*inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return fn(*inputs)
        result: Tensor = checkpoint(fn, *inputs, use_reentrant=False, preserve_rng_state=False)
        if not torch.compiler.is_compiling():
            latest[:] = result, inputs
        return result

    def after_use(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
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

        used.append(memory)
        output.register_hook(fill)

    decorate = torch.compiler.disable if splits else lambda function: function
    owner.forward = decorate(compute)
    user.register_forward_hook(decorate(after_use))
