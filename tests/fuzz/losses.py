"""Losses of a user's own: each as a function for `train_batch`, and as the same formula on the logits of all rows."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import cross_entropy, weights_of
from picotron import process_group_manager as pgm
from picotron.model.cross_entropy import IGNORE_INDEX
from picotron.tensor_parallel.tp_communications import reduce_from_ranks
from tests.fuzz.habits import interrupt
from workbench.own_loops import batches
from workbench.own_loops.log_probs import log_probs

Batch = dict[str, Any]


def focal_terms(log_probs: Tensor) -> Tensor:
    """Compute the focal loss of each target; 0 for a target that does not count, whose log-probability is 0."""
    return -((1 - log_probs.exp()) ** 2) * log_probs


def preference_terms(log_probs: Tensor) -> Tensor:
    """Compute the loss of each pair of sequences, as in DPO, from the log-probabilities of whole sequences."""
    chosen, rejected = log_probs.unflatten(0, (-1, 2)).unbind(1)
    return -F.logsigmoid(0.3 * (chosen - rejected))


def negative_entropy(logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * log_probs).sum(-1).mean()


def focal(head: Any, x: Tensor, batch: Batch) -> Any:
    """A sum over tokens, their number, and a statistic. It does not use the head where no token counts."""
    counted = batch["target_ids"] != IGNORE_INDEX
    if not counted.any():
        return x.sum() * 0, 0.0, {"log_prob": x.new_zeros(())}
    target_log_probs = log_probs(head, x, batch["target_ids"])
    return focal_terms(target_log_probs).sum(), counted.sum(), {"log_prob": target_log_probs.sum()}


def preference(head: Any, x: Tensor, batch: Batch) -> Any:
    terms = preference_terms(batches.sum_over_sequence(log_probs(head, x, batch["target_ids"])))
    return terms.sum(), float(len(terms)), {}


def from_local_logits(head: Any, x: Tensor, batch: Batch) -> Any:
    """A sum over tokens of a function of each logit, which needs those of this rank only."""
    squares = head.local_logits(x).square().sum(-1)
    total = reduce_from_ranks(squares, pgm.process_group_manager.tp_group)
    return total.sum(), float(total.numel()), {}


def mean_of_counted(terms: Tensor, batch: Batch) -> Tensor:
    return terms.sum() / (batch["target_ids"] != IGNORE_INDEX).sum()


def log_probs_of(logits: Tensor, batch: Batch) -> Tensor:
    return -cross_entropy(logits, batch["target_ids"])


def weighted_mean(logits: Tensor, batch: Batch) -> Tensor:
    """Compute the weighted cross entropy of the rows of each `dp_rank`, and the mean over the ranks."""
    losses, weights = cross_entropy(logits, batch["target_ids"]), weights_of(batch)
    ranks = [batch["dp_rank"] == rank for rank in batch["dp_rank"].unique()]
    return torch.stack([(losses[rows] * weights[rows]).sum() / weights[rows].sum() for rows in ranks]).mean()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Batch], Tensor]]] = {
    "cross_entropy": (batches.cross_entropy, weighted_mean),
    "focal": (focal, lambda logits, batch: mean_of_counted(focal_terms(log_probs_of(logits, batch)), batch)),
    "preference": (preference, lambda logits, batch: preference_terms(log_probs_of(logits, batch).sum(1)).mean()),
    "logits": (lambda head, x, batch: negative_entropy(head(x)), lambda logits, batch: negative_entropy(logits)),
    "local_logits": (from_local_logits, lambda logits, batch: logits.square().sum(-1).mean()),
}


def failing(loss_fn: Callable[..., Any], last: int) -> Callable[..., Any]:
    """Return a loss of which the backward of call number `last` fails."""
    calls = itertools.count(1)

    def loss(head: Any, x: Tensor, batch: Batch) -> Any:
        if next(calls) == last:
            x.register_hook(interrupt)
        return loss_fn(head, x, batch)

    return loss
