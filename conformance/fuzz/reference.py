"""The reference of a case: transformers' model and torch's AdamW on one process, one document after the other."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from conformance.case import weights_of
from conformance.experts import named_as
from conformance.fuzz.cases import STEPS, Case
from conformance.fuzz.files import config_of, model_config, own_batch
from conformance.fuzz.losses import LOSSES, mean_log_prob, weighted_mean
from conformance.fuzz.sequences import Document, rows_of_case
from conformance.models import biases, move_biases
from conformance.reference import copies, logits_of_documents
from picotron.config import Config, Training
from picotron.data.loader import epoch_order
from picotron.model.cross_entropy import IGNORE_INDEX
from tests.support.oracle import oracle_model, our_model, torch_adamw

Batch = dict[str, Any]


def train_reference(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train, and return the losses, norms and evaluations of the parts of the case, the gradients of their first steps
    and the weights at their ends.
    """
    first = config_of(case, folder)
    config = model_config(case)
    weights = our_model(config, seed=first.training.seed).state_dict()
    model = oracle_model(config, weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case["frozen"]))
    optimizer = torch_adamw(model.parameters(), first.training)
    rows = None if case["data"]["kind"] == "own" else rows_of_case(case, folder, first)
    ends = [case["resume"]["after"], STEPS] if case["resume"] else [STEPS]
    results, step, samples = [], 0, 0
    for part, end in enumerate(ends):
        run, found = config_of(case, folder, part), {"losses": [], "norms": [], "evaluations": [], "statistics": []}
        G = run.global_batch_size
        while step < end:
            if rows is None:
                loss, statistics = own_loss(model, case, run, own_batch(case, G, step))
                found["statistics"] += statistics
            else:
                training = rows.training
                order = samples + np.arange(G)
                loss = mean_loss(model, [training[i] for i in row_numbers(run, len(training), order)])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run.training, step)
            optimizer.zero_grad()
            loss.backward()
            found.setdefault("gradients", named_as(weights, {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in (*model.named_parameters(), *biases(model).items())
            }))  # fmt: skip
            limit = math.inf if run.training.max_grad_norm is None else run.training.max_grad_norm
            found["losses"].append(loss.item())
            found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            move_biases(model, run.training.router_bias_rate)
            step, samples = step + 1, samples + G
            if rows is not None and run.training.eval_frequency:
                with torch.no_grad():
                    found["evaluations"].append(mean_loss(model, rows.evaluation).item())
        found["weights"] = named_as(weights, copies(model))
        results.append(found)
    return results


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


def mean_loss(model: LlamaForCausalLM, rows: list[list[Document]]) -> Tensor:
    """Compute the weighted mean of the losses of all targets."""
    documents = [document for row in rows for document in row]
    logits = logits_of_documents(model, [torch.tensor(document.input_ids) for document in documents])
    targets = torch.tensor([target for document in documents for target in document.target_ids])
    weights = torch.tensor([weight for document in documents for weight in document.weights], dtype=torch.float64)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def own_loss(model: LlamaForCausalLM, case: Case, config: Config, batch: Batch) -> tuple[Tensor, list[float]]:
    """Compute the loss of a global batch, and its statistics."""
    ids = batch["input_ids"]
    G, T = ids.shape
    lengths = batch.get("cu_seqlens", torch.arange(0, G * T + 1, T)).diff().tolist()
    logits = logits_of_documents(model, ids.flatten().split(lengths)).view(G, T, -1)
    batch = batch | {"target_ids": batch["target_ids"].where(weights_of(batch) > 0, IGNORE_INDEX)}
    data, dp, micro_batches = case["data"], config.distributed.dp_size, config.training.gradient_accumulation_steps
    if data["loss"] == "cross_entropy":
        numbers = torch.arange(G).view(micro_batches, dp, -1)
        ranks = (
            [numbers[:, rank].flatten() for rank in range(dp)] if data["scope"] == "dp_rank" else [numbers.flatten()]
        )
        return weighted_mean(logits, batch, ranks), []
    of_logits: Callable[[Tensor, Batch], Tensor] = LOSSES[data["loss"]][1]
    statistics = [mean_log_prob(logits, batch).item()] if data["loss"] == "focal" else []
    return of_logits(logits, batch), statistics
