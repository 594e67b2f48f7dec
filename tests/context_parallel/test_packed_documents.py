"""Packed documents, weighted targets and own losses: every layout equals transformers on each document by itself."""

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.oracle import assert_close, make_config, oracle_model, our_model, tiny_llama
from conformance.training import Loader, all_stages, layout_name, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.batches import normalise_weights, split_batch, train_batch
from picotron.collectives import all_reduce

TOKENS = 32  # of a row
DOCUMENTS = [  # lengths of the documents in each row of a global batch
    [5, 1, 13, 13],
    [32],
    [32],
    [3, 3, 20, 6],
    [31, 1],
    [9, 7, 9, 7],
    [16, 16],
    [1, 30, 1],
]
MODEL = tiny_llama(num_hidden_layers=4)


def global_batch() -> dict[str, Any]:
    """Return the rows with random tokens. Most targets have weight 0, and so do all of the last micro-batch."""
    generator = torch.Generator().manual_seed(0)
    rows = len(DOCUMENTS)
    ids = torch.randint(61, (rows, TOKENS + 1), generator=generator)
    weights = torch.rand(rows, TOKENS, generator=generator, dtype=torch.float64)
    weights *= torch.rand(rows, TOKENS, generator=generator) < 0.3
    weights *= 7 * torch.rand(rows, 1, generator=generator)
    weights[-2:] = 0
    lengths = [length for row in DOCUMENTS for length in row]
    return {
        "input_ids": ids[:, :-1],
        "target_ids": ids[:, 1:],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).view(rows, TOKENS),
        "target_weights": weights,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
    }


def own_loss(head: Any, x: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the cross entropy plus a tenth of its square, and the square as a statistic."""
    log_probs, weights = head.log_probs(x, batch["target_ids"]), batch["target_weights"]
    square = (log_probs.square() * weights).sum()
    return -(log_probs * weights).sum() + 0.1 * square, weights.sum(), {"square": square}


def run_step(config: Any, own: bool) -> dict[str, Any]:
    """Run a step of the global batch, as train.py does, or with an own loss."""
    model, grid = wrapped(config, MODEL), pgm.process_group_manager
    micro_batches = config.training.gradient_accumulation_steps
    batches = split_batch(global_batch(), micro_batches, config.distributed.cp_sharding)
    step, statistics = step_of(config, MODEL), {}
    if own:
        loss, statistics = train_batch(step, model, batches, own_loss)
    else:
        parts = [batch | {"hidden_states": None} for batch in normalise_weights(batches)]
        total = step(model, Loader(parts)).double()
        all_reduce(total, grid.cp_dp_group, dist.ReduceOp.AVG)
        all_reduce(total, grid.pp_group)
        loss = total.item()
    return {"loss": loss, "statistics": statistics, "gradients": all_stages(model.module.module, "main_grad")}


@functools.cache
def expected_step(own: bool) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, mean square and gradients of transformers' model, one document after the other."""
    model = oracle_model(MODEL, our_model(MODEL, seed=42).state_dict())
    batch = global_batch()
    ids, targets, weights = (batch[name].flatten() for name in ("input_ids", "target_ids", "target_weights"))
    loss = square = torch.zeros((), dtype=torch.float64)
    for start, end in pairwise(batch["cu_seqlens"].tolist()):
        log_probs = model(input_ids=ids[None, start:end], use_cache=False).logits[0].log_softmax(-1)
        log_probs = log_probs.gather(-1, targets[start:end, None])[:, 0]
        loss = loss - (log_probs * weights[start:end]).sum() / weights.sum()
        square = square + (log_probs.square() * weights[start:end]).sum() / weights.sum()
    if own:
        loss = loss + 0.1 * square
    loss.backward()
    return loss.item(), square.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


SHARDINGS = [
    {"cp_size": cp, "cp_engine": engine, "cp_sharding": sharding}
    for cp in (2, 4)
    for engine in ("ring", "all_gather", "ulysses")
    for sharding in ("zigzag", "contiguous")
    if (cp, engine) != (4, "ulysses")  # 2 key/value heads
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp_size": 2},
    {"dp_size": 4},
    {"dp_size": 2, "dp_engine": "zero1"},
    {"dp_size": 2, "cp_size": 2, "dp_engine": "zero3"},
    {"dp_size": 2, "pp_size": 2, "pp_engine": "zbv", "dp_engine": "zero3"},
    {"tp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    *({"pp_size": 2, "pp_engine": engine} for engine in ("afab", "1f1b", "looped_bfs", "interleaved_1f1b")),
    *({"pp_size": 2, "pp_engine": engine} for engine in ("zb_h1", "zbv", "dualpipev")),
    *SHARDINGS,
    {"dp_size": 2, "pp_size": 2, "cp_size": 2},
    {"pp_size": 2, "cp_size": 2, "tp_size": 2, "sequence_parallel": True},
    {"pp_size": 2, "pp_engine": "zbv", "cp_size": 2, "cp_engine": "ulysses"},
]


def compare(pool: WorkerPool, layout: dict[str, Any], own: bool, checkpointing: str) -> None:
    config = make_config(
        **{f"distributed__{key}": value for key, value in layout.items()},
        training__seq_length=TOKENS,
        training__gradient_accumulation_steps=4 // layout.get("dp_size", 1),
        training__activation_checkpointing=checkpointing,
    )
    loss, square, gradients = expected_step(own)
    for result in pool.run(run_step, config.distributed.world_size, config, own):
        assert_close(result["loss"], loss, what="loss")
        if own:
            assert_close(result["statistics"]["square"], square, what="statistic")
        for name, gradient in gradients.items():
            assert_close(result["gradients"][name], gradient, what=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_a_step_equals_transformers_on_each_document(pool: WorkerPool, layout: dict[str, Any]) -> None:
    i = LAYOUTS.index(layout)
    compare(pool, layout, own=i % 4 == 0, checkpointing=("none", "full")[i // 4 % 2])
