"""The reference of a case: transformers' model and torch's AdamW on one process, one document after the other."""

import dataclasses
import functools
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import conformance.case
from conformance.case import weights_of
from conformance.experts import named_as
from conformance.models import move_biases
from conformance.reference import train
from picotron.config import Config, Training
from picotron.data.loader import epoch_order
from picotron.model.cross_entropy import IGNORE_INDEX
from tests.fuzz.cases import STEPS, Case
from tests.fuzz.files import config_of, model_config, own_batch
from tests.fuzz.losses import LOSSES, log_probs_of, mean_of_counted
from tests.fuzz.sequences import Document, rows_of_case
from tests.support.oracle import case_of, oracle_model, our_model

Batch = dict[str, Any]


def train_reference(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train, and return the losses, norms and evaluations of the parts of the case, the gradients of their first steps
    and the weights at their ends.
    """
    runs = [config_of(case, folder, part) for part in range(2 if case["resume"] else 1)]
    ends = [case["resume"]["after"], STEPS] if case["resume"] else [STEPS]
    config, training, loss = model_config(case), runs[0].training, case["data"].get("loss", "cross_entropy")
    weights = our_model(config, seed=training.seed).state_dict()
    model = oracle_model(config, weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case["frozen"]))
    rows = None if case["data"]["kind"] == "own" else rows_of_case(case, folder, runs[0])
    statistics: list[float] = []

    def batch_of(step: int) -> Batch:
        run = runs[sum(step >= end for end in ends)]
        if rows is None:
            return batch_of_own(case, run, step)
        if step < 0:
            return batch_of_rows(rows.evaluation)
        samples = step * run.global_batch_size + np.arange(run.global_batch_size)
        return batch_of_rows([rows.training[i] for i in row_numbers(run, len(rows.training), samples)])

    def loss_of(logits: Tensor, batch: Batch) -> Tensor:
        if loss == "focal":
            statistics.append(mean_of_counted(log_probs_of(logits, batch), batch).item())
        return LOSSES[loss][1](logits, batch)

    evaluates = rows is not None and bool(training.eval_frequency)
    hyperparameters = Hyperparameters(**vars(case_of(training)) | {"evaluates": evaluates, "training": training})
    move = functools.partial(move_biases, rate=training.router_bias_rate)
    found, results = train(model, hyperparameters, batch_of, loss_of=loss_of, after_step=move), []
    for first, last in pairwise([0, *ends]):
        part = found.of(dataclasses.replace(hyperparameters, first_step=first, last_step=last))
        zeros = {name: torch.zeros_like(x) for name, x in found.initial.items()}  # of frozen parameters and biases
        results.append({
            "losses": part.losses, "norms": part.grad_norms, "evaluations": part.evaluations,
            "statistics": statistics[first:last], "weights": named_as(weights, part.weights),
            "gradients": named_as(weights, zeros | (part.gradients or [{}])[0]),
        })  # fmt: skip
    return results


@dataclasses.dataclass(frozen=True)
class Hyperparameters(conformance.case.Case):
    """Hyperparameters of a training, whose learning rate follows any schedule."""

    training: Any = None

    @property
    def learning_rates(self) -> list[float]:
        return [learning_rate(self.training, step) for step in range(STEPS)]


def learning_rate(training: Training, step: int) -> float:
    """Return the learning rate of a step, as --help describes it."""
    peak, warmup, low = training.learning_rate, training.warmup_steps, training.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    total = training.total_train_steps
    done = (step - warmup) / (total - warmup)
    decay = {
        "constant": 1.0,
        "linear": 1 - (1 - low) * done,
        "wsd": low + (1 - low) * min(1.0, (total - step) / training.decay),
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * done)) / 2,
    }
    return peak * decay[training.lr_scheduler]


def row_numbers(config: Config, count: int, samples: np.ndarray) -> list[int]:
    """Return the rows that are global samples, in the order of their epochs."""
    seed, numbers = config.training.seed, []
    for sample in samples.tolist():
        epoch, place = divmod(sample, count)
        numbers.append(int(epoch_order(count, seed, epoch)[place]) if config.dataset.shuffle else place)
    return numbers


def batch_of_rows(rows: list[list[Document]]) -> Batch:
    """Return rows as one, whose documents do not see each other."""
    documents = [document for row in rows for document in row]
    ids, targets, weights = (torch.cat([*map(torch.tensor, lists)])[None] for lists in zip(*documents, strict=True))
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor([len(each.input_ids) for each in documents]))
    batch = {"input_ids": ids.long(), "target_ids": targets.long(), "target_weights": weights.double()}
    return batch | {"document_ids": numbers[None], "dp_rank": torch.zeros(1)}


def batch_of_own(case: Case, run: Config, step: int) -> Batch:
    """Return the global batch of a step, without targets of weight 0, and with the dp rank of each row for losses that
    are means over ranks.
    """
    batch, rows = own_batch(case, run.global_batch_size, step), torch.arange(run.global_batch_size)
    batch["target_ids"] = batch["target_ids"].where(weights_of(batch) > 0, IGNORE_INDEX)
    if "cu_seqlens" in batch:
        batch["document_ids"] = (batch["position_ids"] == 0).cumsum(1)
    has_ranks = case["data"]["scope"] == "dp_rank"
    batch["dp_rank"] = rows // run.training.micro_batch_size % (run.distributed.dp_size if has_ranks else 1)
    return batch
