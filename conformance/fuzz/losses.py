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
from tests.support.training import Fails, Failure
from workbench.own_loops import batches
from workbench.own_loops.log_probs import log_probs

Batch = dict[str, Any]


def focal(head: Any, x: Tensor, batch: Batch) -> Any:
    """The focal loss: a sum over tokens, their number, a statistic. It does not use the head where no token counts."""
    counted = batch["target_ids"] != IGNORE_INDEX
    if not counted.any():
        return x.sum() * 0, 0.0, {"log_prob": x.new_zeros(())}
    target_log_probs = log_probs(head, x, batch["target_ids"])
    losses = -((1 - target_log_probs.exp()) ** 2) * target_log_probs
    return losses.sum(), counted.sum(), {"log_prob": target_log_probs.sum()}


def mean_log_prob(logits: Tensor, batch: Batch) -> Tensor:
    return -cross_entropy(logits, batch["target_ids"]).sum() / (batch["target_ids"] != IGNORE_INDEX).sum()


def focal_of_logits(logits: Tensor, batch: Batch) -> Tensor:
    log_probs, counted = -cross_entropy(logits, batch["target_ids"]), batch["target_ids"] != IGNORE_INDEX
    return -((1 - log_probs.exp()) ** 2 * log_probs).sum() / counted.sum()


def preference(head: Any, x: Tensor, batch: Batch) -> Any:
    """A loss of pairs of sequences, as in DPO: it needs the log-probability of a whole sequence."""
    chosen, rejected = (
        batches.sum_over_sequence(log_probs(head, x, batch["target_ids"])).unflatten(0, (-1, 2)).unbind(1)
    )
    return -F.logsigmoid(0.3 * (chosen - rejected)).sum(), float(len(chosen)), {}


def preference_of_logits(logits: Tensor, batch: Batch) -> Tensor:
    chosen, rejected = (-cross_entropy(logits, batch["target_ids"])).sum(1).unflatten(0, (-1, 2)).unbind(1)
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean()


def from_logits(head: Any, x: Tensor, batch: Batch) -> Tensor:
    """A mean over tokens that needs all logits: the negative entropy."""
    return negative_entropy(head(x))


def negative_entropy(logits: Tensor, _: Any = None) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * log_probs).sum(-1).mean()


def from_local_logits(head: Any, x: Tensor, batch: Batch) -> Any:
    """A sum over tokens of a function of each logit, which needs those of this rank only."""
    squares = head.local_logits(x).square().sum(-1)
    total = reduce_from_ranks(squares, pgm.process_group_manager.tp_group)
    return total.sum(), float(total.numel()), {}


def squares_of_logits(logits: Tensor, _: Any = None) -> Tensor:
    return logits.square().sum(-1).mean()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Batch], Tensor]]] = {
    "focal": (focal, focal_of_logits),
    "preference": (preference, preference_of_logits),
    "logits": (from_logits, negative_entropy),
    "local_logits": (from_local_logits, squares_of_logits),
}


def failing(loss_fn: Callable[..., Any], where: str, last: int) -> Callable[..., Any]:
    """Return a loss that fails in call number `last`, if `where` is forward or backward."""
    calls = itertools.count(1)

    def loss(head: Any, x: Tensor, batch: Batch) -> Any:
        fails = next(calls) == last
        if fails and where == "forward":
            raise Failure
        return loss_fn(head, Fails.apply(x) if fails and where == "backward" else x, batch)

    return loss


def weighted_mean(logits: Tensor, batch: Batch, rows_of_ranks: list[Tensor]) -> Tensor:
    """Compute the weighted cross entropy of each group of rows, and the mean over the groups."""
    losses, weights = cross_entropy(logits, batch["target_ids"]), weights_of(batch)
    return torch.stack([(losses[r] * weights[r]).sum() / weights[r].sum() for r in rows_of_ranks]).mean()
