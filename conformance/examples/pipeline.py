"""A pipeline in plain torch, 1F1B: each rank has some layers, and activations travel from rank to rank.

Narayanan et al. 2020, arXiv:2006.09503.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Case, Result
from conformance.adapters.loop import chunks, sum_norms, train
from conformance.adapters.stage import Stage
from conformance.case import Batch, weights_of

AXES = ("pp",)
CHAPTERS = ("step", "run", "loss", "float32")
LACKS = ("documents", "evaluation", "resume")
LAYOUTS = ("pp2 afab",)


def order(rank: int, ranks: int, micro_batches: int, name: str) -> str:
    """Return the order of a rank's forwards (F) and backwards (B). With 1F1B, at most ranks - rank activations wait."""
    before = micro_batches if name == "afab" else min(ranks - 1 - rank, micro_batches)
    return before * "F" + (micro_batches - before) * "FB" + before * "B"


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last, name = ranks - 1, "".join(case.words) or "1f1b"
    case.require(name in ("1f1b", "afab"), f"there is no schedule {name}")
    model: Any = case.model()
    stage, ends = Stage(model, rank, ranks), dist.new_group(sorted({0, last}))
    parameters, shared = dict(stage.named_parameters()), None
    if model.config.tie_word_embeddings and rank in (0, last):
        shared = model.lm_head.weight  # a copy on the first rank, and another one on the last rank

    def receive(batch: Batch, source: int) -> Tensor:
        rows, tokens = batch["input_ids"].shape
        tensor = torch.empty(rows // case.micro_batches, tokens, model.config.hidden_size, dtype=case.torch_dtype)
        dist.recv(tensor, source)
        return tensor

    def backward(batch: Batch, total: Tensor) -> float | None:
        pieces = iter(chunks(batch, case.micro_batches))
        messages = list[Any]()  # handles of isend: with send, a rank would wait while the other one sends, too
        waiting, loss = list[tuple[Tensor, Tensor]](), torch.zeros((), dtype=torch.float64)
        for action in order(rank, ranks, case.micro_batches, name):
            if action == "F":
                piece = next(pieces)
                x = piece["input_ids"] if rank == 0 else receive(batch, rank - 1).requires_grad_()
                y = stage(x)
                if rank == last:
                    y = (case.token_losses(y, piece["target_ids"]) * weights_of(piece)).sum() / total
                    loss += y.detach()
                else:
                    messages.append(dist.isend(y.detach(), rank + 1))
                waiting.append((x, y))
            else:
                x, y = waiting.pop(0)  # the oldest micro-batch
                y.backward(None if rank == last else receive(batch, rank + 1))
                if x.grad is not None:
                    messages.append(dist.isend(x.grad, rank - 1))
        for message in messages:
            message.wait()
        if shared is not None:
            dist.all_reduce(shared.grad, group=ends)
        return float(loss) if rank == last else None

    clip = functools.partial(sum_norms, share=lambda p: float(p is not shared or rank == 0))
    return train(case, parameters, backward, clip)
