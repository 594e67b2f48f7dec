"""Steps and forward passes on a user's batches: losses and outputs in order, and errors that every rank raises."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.model.placement import main_grad
from tests.support.oracle import CPU, assert_close, make_config, oracle_model, our_model, tiny_llama
from tests.support.training import layout_name, step_of, wrapped
from workbench.own_loops.batches import cross_entropy, forward_batch, split_batch, train_batch
from workbench.own_loops.log_probs import log_probs
from workbench.pipelines.engine import make_evaluation, plan_pipeline

MODEL = tiny_llama(num_hidden_layers=6)


def global_batch() -> dict[str, Any]:
    ids = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:], "number": torch.arange(8), "factor": 0.5}


def config_of(layout: dict[str, Any], **changes: Any) -> Any:
    keys = {"training__gradient_accumulation_steps": 4 // layout.get("dp_size", 1), "training__eval_steps": 1}
    return make_config(**keys | layout | changes)


def run_batch(config: Any) -> dict[str, Any]:
    """Run both kinds of forward pass, then a step, on the same micro-batches."""
    model, grid = wrapped(config, MODEL), pgm.process_group_manager
    micro_batches = config.training.gradient_accumulation_steps
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    batches, losses = split_batch(global_batch(), micro_batches), [torch.zeros(1)]

    def hook(head: Any, x: Tensor, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"log_probs": log_probs(head, x, batch["target_ids"]), "number": batch["number"]}

    def loss_fn(head: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
        return batch["factor"] * log_probs(head, x, batch["target_ids"]).mean()

    logits = forward_batch(evaluate, model, batches)
    outputs = forward_batch(evaluate, model, batches, hook)
    assert not any(main_grad(parameter).any() for parameter in model.parameters())
    train_batch(step_of(config, MODEL), model, batches, loss_fn, losses)
    return {"dp_rank": grid.dp_rank, "losses": losses, "logits": logits, "outputs": outputs}


LAYOUTS: list[dict[str, Any]] = [  # the last stage is on the last ranks, and on the first ones
    {"pp_size": 2, "dp_size": 2, "pp_engine": "1f1b"},
    {"pp_size": 2, "tp_size": 2, "sequence_parallel": True, "pp_engine": "zbv"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_outputs_of_a_rank_are_those_of_its_rows_in_order(pool: WorkerPool, layout: dict[str, Any]) -> None:
    config, batch = config_of(layout), global_batch()
    model = oracle_model(MODEL, our_model(MODEL, seed=42).state_dict())
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits.detach()
    log_probs = logits.log_softmax(-1).gather(-1, batch["target_ids"][..., None])[..., 0]
    size, holders = layout.get("dp_size", 1), 0
    for result in pool.run(run_batch, config.distributed.world_size, config):
        if result["logits"] is None:
            assert result["losses"] == []
            assert result["outputs"] is None
            continue
        holders += 1
        own = torch.arange(8).view(-1, size, 2)[:, result["dp_rank"]].flatten()  # the rows of this dp rank
        assert_close(torch.stack(result["losses"]), log_probs[own].view(-1, 32).mean(1) / 2, what="losses")
        assert_close(result["logits"], logits[own], what="logits")
        assert_close(result["outputs"]["log_probs"], log_probs[own], what="log_probs")
        assert result["outputs"]["number"].tolist() == own.tolist()
    assert holders == layout.get("tp_size", 1) * size


# -------------------------------------------------------------------------------------------------------------- errors


def message(action: Any) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def mistakes(layout: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pairs: a part of the expected error, and the error on this rank."""
    config = config_of(layout)
    model, step = wrapped(config, MODEL), step_of(config, MODEL)
    parts = split_batch(global_batch(), 4)
    zeros = [part | {"target_weights": torch.zeros(2, 16)} for part in parts]
    rows = torch.tensor([0, 16, 32], dtype=torch.int32)
    left = torch.tensor([[1] * 16, [0] * 3 + [1] * 13])

    def train(batches: Any, loss_fn: Any = cross_entropy, **options: Any) -> str:
        model.zero_grad()
        return message(lambda: train_batch(step, model, batches, loss_fn, **options))

    def changed(**changes: Any) -> str:
        return train([parts[0] | changes, *parts[1:]])

    def returned(change: Any) -> str:
        return train(parts, lambda head, x, batch: change(cross_entropy(head, x, batch)))

    def names(head: Any, x: Tensor, batch: dict[str, Any]) -> Any:
        loss = cross_entropy(head, x, batch)
        return loss, 1.0, {f"{int(batch['number'][0])}": loss}

    def split(batch: Any, micro_batches: int = 4) -> str:
        return message(lambda: split_batch(batch, micro_batches))

    found = [
        ("at least 1", train([])),
        ("target_ids have 9999", changed(target_ids=torch.full((2, 16), 9999))),
        ("target_ids have shape [2, 15]", changed(target_ids=torch.zeros(2, 15, dtype=torch.int64))),
        ("from 0 to 32", changed(cu_seqlens=rows[:-1])),
        ("hides tokens before others", changed(attention_mask=left)),
        (
            "only some micro-batches have target_weights",
            train([*parts[:-1], parts[-1] | {"target_weights": torch.ones(2, 16)}]),
        ),
        ("global batch sum to 0", train([part | {"target_ids": torch.full((2, 16), -100)} for part in parts])),
        ("(B, T), but found none", train([{"target_ids": part["target_ids"]} for part in parts])),
        ("scope='rank'", train(zeros, scope="rank")),
        ("8 sequences", split(global_batch(), 3)),
    ]
    if layout:
        return [*found, ("for 4 micro-batches, not 3", train(parts[:3]))]
    found += [
        ("without a gradient", returned(lambda loss: loss.detach())),
        ("sum to 0", returned(lambda loss: (loss, 0.0, {}))),
        ("different names for two micro-batches", train(parts, names)),
        ("no error", train(parts)),
        ("gradients of an earlier train_batch", message(lambda: train_batch(step, model, parts))),
    ]
    model.requires_grad_(False)
    return [*found, ("was frozen after", train(parts))]


@pytest.mark.parametrize("layout", [{}, {"pp_size": 2, "pp_engine": "interleaved_1f1b"}], ids=layout_name)
def test_each_mistake_is_an_error_on_every_rank(pool: WorkerPool, layout: dict[str, Any]) -> None:
    for found in pool.run(mistakes, layout.get("pp_size", 1), layout):
        assert [pair for pair in found if pair[0] not in pair[1]] == []


def different_batches(layout: dict[str, Any], what: str) -> str:
    """Return the error if rank 1 has other micro-batches than rank 0, or another loss."""
    config = config_of(layout)
    model, step, rank = wrapped(config, MODEL), step_of(config, MODEL), pgm.process_group_manager.global_rank
    parts = split_batch(global_batch(), config.training.gradient_accumulation_steps)
    if rank == 1 and what == "count":
        parts = parts[1:]
    elif what == "zeros":
        parts = [part | {"target_weights": torch.full((2, 16), float(rank))} for part in parts]
    elif what in ("documents on rank 0", "documents on rank 1"):
        here = rank == int(what[-1])
        parts = [part | {"cu_seqlens": torch.tensor([0, 8, 16, 32])} if here else part for part in parts]
    elif what == "other documents":
        parts = [part | {"cu_seqlens": torch.tensor([0, 8 - 4 * rank, 16, 32])} for part in parts]
    elif what == "odd":
        parts = split_batch({name: global_batch()[name][:, :15] for name in ("input_ids", "target_ids")}, 4)
    elif rank == 1 and what in ("input_ids", "target_ids"):
        parts = [part | {what: parts[0][what].flip(0)} for part in parts]

    def named(head: Any, x: Tensor, batch: dict[str, Any]) -> Any:
        return cross_entropy(head, x, batch), 1.0, {f"n{rank}": 1.0}

    loss_fn, scope = named if what == "names" else cross_entropy, "dp_rank" if what == "zeros" else "global"
    return message(lambda: train_batch(step, model, parts, loss_fn, scope=scope))


@pytest.mark.parametrize(
    ("layout", "what", "expected"),
    [
        ({"pp_size": 2}, "input_ids", "input_ids of micro-batch 0 differ between ranks 0 and 1"),
        ({"tp_size": 2}, "target_ids", "target_ids of micro-batch 0 differ between ranks 0 and 1"),
        *(
            (layout, f"documents on rank {rank}", "pass rows of the same shape, with the same cu_seqlens")
            for layout, rank in (({"tp_size": 2}, 0), ({"pp_size": 2}, 1), ({"cp_size": 2}, 1))
        ),
        ({"cp_size": 2}, "other documents", "pass rows of the same shape, with the same cu_seqlens"),
        ({"tp_size": 2, "sequence_parallel": True}, "odd", "15 tokens on this rank, which sequence_parallel divides"),
        ({"dp_size": 2}, "input_ids", "no error"),
        ({"dp_size": 2}, "count", "have [2, 1] micro-batches"),
        ({"dp_size": 2}, "zeros", "a data-parallel rank sum to 0"),
        ({"dp_size": 2}, "names", "'n0' on some ranks only"),
    ],
)
def test_batches_that_should_be_equal_are_compared(
    pool: WorkerPool, layout: dict[str, Any], what: str, expected: str
) -> None:
    for found in pool.run(different_batches, 2, layout, what):
        assert expected in found


def with_a_window(document: int) -> str:
    """Train on rows of 16 tokens and a window of 8."""
    config, model_config = config_of({}, training__seq_length=8), tiny_llama("mistral", sliding_window=8)
    model, ids = wrapped(config, model_config), torch.zeros(4, 16, dtype=torch.int64)
    batch = {"input_ids": ids, "target_ids": ids, "cu_seqlens": torch.arange(0, 65, document)}
    return message(lambda: train_batch(step_of(config, model_config), model, split_batch(batch, 4)))


def test_a_document_longer_than_the_models_window_is_an_error(pool: WorkerPool) -> None:
    assert "16 tokens is longer than the model's sliding_window=8" in pool.run(with_a_window, 1, 16)[0]
    assert pool.run(with_a_window, 1, 8) == ["no error"]


def other_sharding() -> str:
    config = config_of({"cp_size": 2, "cp_sharding": "contiguous"})
    model = wrapped(config, MODEL)
    return message(lambda: train_batch(step_of(config, MODEL), model, split_batch(global_batch(), 4)))


def test_batches_that_are_sharded_unlike_the_model_are_an_error(pool: WorkerPool) -> None:
    for found in pool.run(other_sharding, 2):
        assert "cp_sharding='zigzag', but the config has 'contiguous'" in found
