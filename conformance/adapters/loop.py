"""Training loop that the adapters of torch's own parallelism share: all but forward, backward and the norm."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance import Case, Result
from conformance.case import Batch, weights_of


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def torch_norm(parameters: list[nn.Parameter], limit: float) -> float:
    """Clip with torch's function, which knows the placements of DTensors."""
    return float(whole(nn.utils.clip_grad_norm_(parameters, limit)))


def train(
    case: Case,
    parameters: Mapping[str, nn.Parameter],
    backward: Callable[[Batch, Tensor], float | None],
    clip: Callable[[list[nn.Parameter], float], float] = torch_norm,
    load: Callable[[torch.optim.Optimizer], object] | None = None,
    save: Callable[[torch.optim.Optimizer], object] | None = None,
) -> Result:
    """Take the steps of a case.

    Args:
        parameters: this rank's parameters, by transformers' names.
        backward: function of the global batch and the sum of its targets' weights. It leaves gradients in the
            parameters, and returns the loss, or None if the rank does not know it.
        clip: function that clips gradients to a norm, and returns the norm before.
        load, save: functions that read and write the weights and the optimizer of `case.load` and `case.output`.
    """
    result, own = Result(), list(parameters.values())
    groups = [{"params": [p for p in own if p.ndim >= 2], "weight_decay": case.weight_decay}]
    groups += [{"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=1.0, betas=(case.beta1, case.beta2), eps=case.eps
    )
    if load is not None and case.load is not None:
        load(optimizer)
    for step in case.steps:
        for group in optimizer.param_groups:
            group["lr"] = case.learning_rates[step]
        batch = case.batch(step)
        loss = backward(batch, weights_of(batch).sum())
        if step == case.first_step:
            result.gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norm = clip(own, math.inf if case.max_grad_norm is None else case.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        result.losses += [] if loss is None else [loss]
        result.grad_norms.append(norm)
    if save is not None and case.saves:
        save(optimizer)
    result.weights = dict(parameters)
    return result
