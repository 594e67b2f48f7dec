"""Adapter of transformers' models with torch's DistributedDataParallel.

The word `own_loss` takes the loss that transformers' model computes, with `num_items_in_batch`.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from conformance import Case, Result
from conformance.adapters.loop import chunks, train
from conformance.case import Batch, weights_of

AXES = ("dp",)
CHAPTERS = ("step", "run", "loss", "export", "float32", "mixed")
LACKS = ("evaluation", "resume")
LAYOUTS = ("dp2 own_loss no_weights",)
IN_FLOAT32 = {"loss": 2e-7, "gradient": 2e-6, "gradient norm": 2e-7, "weight": 2e-6}
KNOWN = {("run", LAYOUTS[0]): ("transformers' loss converts float64 to float32", IN_FLOAT32)}


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = case.model()
    wrapped, own_loss = DistributedDataParallel(model), "own_loss" in case.words
    case.require(not own_loss or case.loss == "cross_entropy", "transformers' loss is the cross entropy")

    def loss_of(piece: Batch, total: Tensor) -> Tensor:
        inputs = {"input_ids": piece["input_ids"], "use_cache": False}
        if "document_ids" in piece:
            inputs["position_ids"] = piece["position_ids"]  # from which transformers builds a mask of documents
        if own_loss:
            targets = piece["target_ids"]
            found: Tensor = wrapped(**inputs, labels=targets, shift_labels=targets, num_items_in_batch=total).loss
            return found
        losses = case.token_losses(wrapped(**inputs).logits, piece["target_ids"])
        return (losses * weights_of(piece)).sum() / total

    def backward(batch: Batch, total: Tensor) -> float:
        pieces = chunks(chunks(batch, ranks)[rank], case.micro_batches)
        loss = torch.zeros((), dtype=torch.float64)
        for i, piece in enumerate(pieces):
            with contextlib.nullcontext() if i == len(pieces) - 1 else wrapped.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
                    part = loss_of(piece, total)
                (part * ranks).backward()  # because DistributedDataParallel averages over the ranks
            loss += part.detach()
        dist.all_reduce(loss)
        return loss.item()

    result = train(case, dict(model.named_parameters()), backward)
    if case.exports and rank == 0:
        model.save_pretrained(case.output)
    dist.barrier()
    return result
