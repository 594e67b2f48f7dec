"""Training loop that the examples and the adapters of torch's own parallelism share, norms, and micro-batches."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance import Case, Result
from conformance.case import Batch, weights_of
from conformance.reference import adamw


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def torch_norm(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Clip with torch's function, which knows the placements of DTensors. Returns the norm before."""
    return whole(nn.utils.clip_grad_norm_(parameters, limit))


def sum_norms(
    parameters: list[nn.Parameter], limit: float, share: Callable[[nn.Parameter], float] = lambda p: 1.0
) -> Tensor:
    """Clip by the norm of all ranks' gradients, of which each rank has a part.

    Args:
        share: function that returns how much of a gradient's square this rank counts, if others have the same gradient.
    """
    square = torch.stack([p.grad.double().square().sum() * share(p) for p in parameters if p.grad is not None]).sum()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())
    return square.sqrt()


def norm_of_mixed(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Clip by the norm of DTensors on any meshes and of plain tensors, which every rank has; torch's function does not
    accept them in one call.
    """
    gradients, on_mesh = [p.grad for p in parameters if p.grad is not None], defaultdict[Any, list[Tensor]](list)
    for gradient in gradients:
        on_mesh[getattr(gradient, "device_mesh", None)].append(gradient)
    norm = torch.stack([whole(nn.utils.get_total_norm(group)) for group in on_mesh.values()]).norm()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([each.to_local() if isinstance(each, DTensor) else each for each in gradients], scale)
    return norm


def chunks(batch: Batch, n: int, dim: int = 0) -> list[Batch]:
    """Split all tensors of a batch along a dimension: rows (0) or tokens (1)."""
    return [dict(zip(batch, x, strict=True)) for x in zip(*(x.chunk(n, dim) for x in batch.values()), strict=True)]


def accumulate(
    case: Case,
    own: Batch,
    total: Tensor,
    logits_of: Callable[[Batch], Tensor],
    scale: int = 1,
    synchronize: Callable[[bool], object] = bool,
) -> Tensor:
    """Run forward and backward of each micro-batch, and return the loss of this rank's targets.

    Args:
        own: this rank's part of the global batch.
        total: sum of the weights of all targets of the global batch.
        scale: factor of the gradients: the number of ranks where a trainer averages over the ranks.
        synchronize: function that is called before each micro-batch, with whether it is the last.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for i, piece in enumerate(chunks(own, case.micro_batches)):
        synchronize(i == case.micro_batches - 1)
        losses = case.token_losses(logits_of(piece), piece["target_ids"]) * weights_of(piece)
        (losses.sum() / total * scale).backward()
        loss += losses.sum().detach() / total
    return loss


def train(
    case: Case,
    parameters: Mapping[str, nn.Parameter],
    backward: Callable[[Batch, Tensor], float | None],
    clip: Callable[[list[nn.Parameter], float], Tensor] = torch_norm,
    optimizer: torch.optim.Optimizer | None = None,
) -> Result:
    """Take the steps of a case.

    Args:
        parameters: this rank's parameters, by transformers' names.
        backward: function of the global batch and the sum of its targets' weights. It leaves gradients in the
            parameters, and returns the loss, or None if the rank does not know it.
        clip: function that clips gradients to a norm, and returns the norm before.
        optimizer: the optimizer; None: AdamW of the parameters.
    """
    gradients, own = list[Any](), list(parameters.values())
    result = Result(gradients=gradients)
    optimizer = optimizer or adamw(own, case)
    for step in case.steps:
        for group in optimizer.param_groups:
            group["lr"] = case.learning_rates[step]
        batch = case.batch(step)
        loss = backward(batch, weights_of(batch).sum())
        gradients.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        norm = clip(own, math.inf if case.max_grad_norm is None else case.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        result.losses += [] if loss is None else [loss]
        result.grad_norms.append(float(norm))
    result.weights = dict(parameters)
    return result
