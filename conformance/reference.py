"""The reference: transformers' model and torch's AdamW on one process, one document after the other."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.case import Batch, Case, weights_of
from conformance.experts import named_as
from conformance.models import biases
from conformance.result import Result


@dataclasses.dataclass
class Reference(Result):
    """Results of the reference: whole tensors.

    Args:
        initial: weights before the first step.
        after: weights after each step.
    """

    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    initial: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    after: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)

    def of(self, case: Case) -> "Reference":
        """Return the results of a case, whose steps are some of these. One that resumes is part of a training without
        interruption.
        """
        steps = slice(case.first_step, case.last_step)
        lists = ("losses", "grad_norms", "gradients", "evaluations")
        weights = ([self.initial, *self.after])[case.last_step]
        return dataclasses.replace(self, weights=weights, **{name: getattr(self, name)[steps] for name in lists})


def run_reference(case: Case) -> Reference:
    """Run the steps of a case, from the first one of all, on one process in float64."""
    model = dataclasses.replace(case, dtype="float64").model()
    return train(model, case, case.batch)


def train(
    model: nn.Module,
    case: Case,
    batch_of: Callable[[int], Batch],
    rounding: Any = None,
    loss_of: Callable[[Tensor, Batch], Tensor] | None = None,
    after_step: Callable[[nn.Module], object] = bool,
) -> Reference:
    """Train a model with the hyperparameters of a case.

    Args:
        model: transformers' model, or another one with `logits` in its output.
        batch_of: function of the step (0, 1, ...) that returns its global batch; of -1: the batch for evaluations.
        rounding: errors to make, see `Rounding`.
        loss_of: function of the logits and the batch; None: the mean of `Case.token_losses`.
        after_step: function of the model, which is called after each step of the optimizer.

    Returns:
        The results of all steps up to `case.last_step`.
    """
    found, parameters = Reference(initial=copies(model)), dict(model.named_parameters())
    optimizer = adamw(parameters.values(), case)

    def forward(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the logits, and the tensor of which it is a function: with errors, not that of the graph."""
        with rounding or contextlib.nullcontext():
            logits = logits_of(model, batch)
        own = logits if rounding is None else logits.detach().requires_grad_()
        if loss_of is not None:
            return loss_of(own, batch), logits, own
        weights = weights_of(batch).to(torch.promote_types(logits.dtype, torch.float32))
        return (case.token_losses(own, batch["target_ids"]) * weights).sum() / weights.sum(), logits, own

    for step in range(case.last_step):
        for group in optimizer.param_groups:
            group["lr"] = case.learning_rates[step]
        optimizer.zero_grad()
        loss, logits, own = forward(batch_of(step))
        if rounding is None:
            loss.backward()
        else:  # the loss is computed in float32
            (gradient,) = torch.autograd.grad(loss, own)
            with rounding:
                logits.backward(gradient * 1)
        found.gradients.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        limit = math.inf if case.max_grad_norm is None else case.max_grad_norm
        norm = nn.utils.clip_grad_norm_(parameters.values(), limit).item()
        optimizer.step()
        after_step(model)
        if rounding:
            rounding.round_weights(model)
        found.losses.append(loss.item())
        found.grad_norms.append(norm)
        found.after.append(copies(model))
        if case.evaluates:
            with torch.no_grad():
                found.evaluations.append(forward(batch_of(-1))[0].item())
    found.weights = copies(model)
    if case.new_tokens:
        found.tokens = continued(model, case.prompts(), case.new_tokens)
    return found


def named_like(found: Reference, names: Collection[str]) -> Reference:
    """Return a reference with the names of the hub for experts, if `names` are such names, see `named_as`."""
    gradients, after = ([named_as(names, each) for each in every] for every in (found.gradients, found.after))
    weights, initial = named_as(names, found.weights), named_as(names, found.initial)
    return dataclasses.replace(found, gradients=gradients, weights=weights, initial=initial, after=after)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in (*model.named_parameters(), *biases(model).items())}


def adamw(parameters: Iterable[nn.Parameter], case: Case) -> torch.optim.AdamW:
    """Return the optimizer of a case: matrices decay, other parameters do not."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (case.weight_decay, 0.0)]
    for p in parameters:
        groups[p.ndim < 2]["params"].append(p)
    return torch.optim.AdamW(groups, lr=case.learning_rate, betas=(case.beta1, case.beta2), eps=case.eps)


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the logits (G, T, V). The documents of a row are rows of their own, see `logits_of_documents`."""
    ids = batch["input_ids"]
    if "document_ids" not in batch:
        whole: Tensor = model(input_ids=ids, use_cache=False).logits
        return whole
    lengths = [n for row in batch["document_ids"] for n in row.unique_consecutive(return_counts=True)[1].tolist()]
    return logits_of_documents(model, ids.flatten().split(lengths)).view(*ids.shape, -1)


def logits_of_documents(model: nn.Module, documents: Sequence[Tensor]) -> Tensor:
    """Compute the logits of all tokens (n, V). Documents are padded at their ends: a causal model cannot see the
    padding, and positions begin at 0.
    """
    logits = model(input_ids=nn.utils.rnn.pad_sequence(list(documents), batch_first=True), use_cache=False).logits
    return torch.cat([row[: len(document)] for row, document in zip(logits, documents, strict=True)])


@torch.no_grad()
def continued(model: nn.Module, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Continue each prompt with its likeliest tokens, without a cache."""
    ids = torch.tensor(prompts)
    for _ in range(new_tokens):
        ids = torch.cat([ids, logits_of(model, {"input_ids": ids})[:, -1:].argmax(-1)], 1)
    found: list[list[int]] = ids[:, -new_tokens:].tolist()
    return found
