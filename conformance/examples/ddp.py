"""Data parallelism in plain torch: a complete adapter. Each rank has a whole model and some rows of the batch."""

import torch
import torch.distributed as dist
from torch import nn

from conformance import Case, Result
from conformance.case import weights_of
from conformance.reference import adamw, logits_of

AXES = ("dp",)
CHAPTERS = ("step", "steps", "accumulation", "odd", "tied", "packed", "masks", "weights", "loss", "float32", "export")


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, result = case.model(), Result()
    optimizer = adamw(model.parameters(), case)
    for step in case.steps:
        batch = case.batch(step)
        own = {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}  # (G, T) -> (G/dp, T)
        pieces = zip(*(tensor.chunk(case.micro_batches) for tensor in own.values()), strict=True)
        total = weights_of(own).sum()
        dist.all_reduce(total)
        loss = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for piece in (dict(zip(own, tensors, strict=True)) for tensors in pieces):
            losses = case.token_losses(logits_of(model, piece), piece["target_ids"]) * weights_of(piece)
            part = losses.sum() / total
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if step == case.first_step:
            result.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or float("inf"))
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = case.learning_rates[step]
        optimizer.step()
        result.losses.append(loss.item())
        result.grad_norms.append(norm.item())
    if case.exports and rank == 0:
        model.save_pretrained(case.output)
    dist.barrier()
    result.weights = dict(model.named_parameters())
    return result
