"""Micro-batches of unequal shapes, and sequences that are packed into them, equal transformers on one process."""

import functools
import itertools
import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import picotron.sequences
from conformance.oracle import CPU, assert_close, make_config, oracle_model, our_model, tiny_llama
from conformance.training import all_stages, layout_name, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.batches import forward_batch, split_batch, train_batch
from picotron.console import UserError
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.process_group_manager import setup_process_group_manager
from picotron.sequences import pack_sequences
from picotron.train_step import make_evaluation

MODEL = tiny_llama(num_hidden_layers=4)
LENGTHS = (9, 3, 14, 1, 7, 30, 2, 11, 5, 6, 13, 4, 8, 1, 10, 12, 3, 17)


def sequences(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length + 1,), generator=draw) for length in lengths]
    return [{"input_ids": row[:-1], "target_ids": row[1:], "name": i} for i, row in enumerate(rows)]


@functools.cache
def expected(lengths: Sequence[int] = LENGTHS) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Return transformers' mean loss over all tokens, its gradients, and the log-probabilities of each sequence."""
    model, log_probs = oracle_model(MODEL, our_model(MODEL, seed=42).state_dict()), []
    for each in sequences(lengths):
        logits = model(input_ids=each["input_ids"][None], use_cache=False).logits[0]
        log_probs.append(-F.cross_entropy(logits, each["target_ids"], reduction="none"))
    loss = -torch.cat(log_probs).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, [each.detach() for each in log_probs]


def log_probs_of(head: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
    return head.log_probs(x, batch["target_ids"])


def config_of(layout: dict[str, Any], micro_batches: int) -> Any:
    changes = {f"distributed__{key}": value for key, value in layout.items()}
    return make_config(**changes, training__gradient_accumulation_steps=micro_batches)


def run_packed(layout: dict[str, Any], options: dict[str, Any], lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    config = config_of(layout, options.get("micro_batches", 4))
    model = wrapped(config, MODEL)
    packed = pack_sequences(sequences(lengths), cp_sharding=config.distributed.cp_sharding, **options)
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    before = packed.unpack(forward_batch(evaluate, model, packed.batches, log_probs_of, merge=list))
    outputs: list[Any] = []
    result = train_batch(step_of(config, MODEL), model, packed.batches, outputs=outputs, post_hook=log_probs_of)
    numbers = [number for batch in packed.batches for number in batch["name"]]
    return {
        "loss": result.loss,
        "gradients": all_stages(model.module.module, "main_grad"),
        "log_probs": before,
        "training": packed.unpack(outputs or None),
        "tokens": [sum(lengths[i] for i in batch["name"]) for batch in packed.batches],
        "place": (pgm.process_group_manager.dp_rank, numbers),
    }


LAYOUTS: list[dict[str, Any]] = [
    {"dp_size": 3},
    {"cp_size": 2, "cp_sharding": "contiguous", "cp_engine": "all_gather"},
    {"pp_size": 2, "pp_engine": "1f1b"},
    {"pp_size": 2, "pp_engine": "zbv", "tp_size": 2, "sequence_parallel": True},
]


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_packed_sequences_equal_transformers(pool: WorkerPool, layout: dict[str, Any]) -> None:
    loss, gradients, log_probs = expected()
    config = config_of(layout, 4)
    results = pool.run(run_packed, config.distributed.world_size, layout, {"micro_batches": 4})
    for result in results:
        assert_close(result["loss"], loss, what="loss")
        assert result["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert_close(result["gradients"][name], gradient, what=name)
        for kind in ("log_probs", "training"):
            if result[kind] is not None:
                for ours, theirs in zip(result[kind], log_probs, strict=True):
                    assert_close(ours, theirs, what=kind)
    assert any(result["log_probs"] is not None for result in results)
    places = dict(result["place"] for result in results)
    assert sorted(itertools.chain(*places.values())) == list(range(len(LENGTHS)))
    tokens = [count for result in results for count in result["tokens"]]
    assert max(tokens) <= max(*LENGTHS, 2 * sum(LENGTHS) / (4 * layout.get("dp_size", 1)))


def test_micro_batches_have_at_most_max_tokens(pool: WorkerPool) -> None:
    loss, _, log_probs = expected()
    (result,) = pool.run(run_packed, 1, {}, {"max_tokens": 31})
    assert max(result["tokens"]) <= 31
    assert 6 <= len(result["tokens"]) <= 8  # 156 tokens need at least 6
    assert_close(result["loss"], loss, what="loss")
    for ours, theirs in zip(result["log_probs"], log_probs, strict=True):
        assert_close(ours, theirs, what="log-probabilities")


@pytest.mark.parametrize(
    "layout", [{"dp_size": 2}, {"dp_size": 2, "cp_size": 2, "dp_engine": "zero3"}], ids=layout_name
)
def test_a_rank_with_too_few_sequences_gets_padding(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Three sequences of which no two fit together, for two micro-batches on each of two ranks."""
    lengths = (10, 7, 9)
    loss, gradients, log_probs = expected(lengths)
    results = pool.run(run_packed, config_of(layout, 1).distributed.world_size, layout, {"max_tokens": 12}, lengths)
    for result in results:
        assert_close(result["loss"], loss, what="loss")
        for name, gradient in gradients.items():
            assert_close(result["gradients"][name], gradient, what=name)
        for ours, theirs in zip(result["training"], log_probs, strict=True):
            assert_close(ours, theirs, what="log-probabilities")
    assert sorted(results[-1]["tokens"] + results[0]["tokens"]) == [0, 7, 9, 10]


def kinds_of_values() -> list[Any]:
    setup_process_group_manager(1, 1, 1, 1)
    rows = [{"input_ids": torch.zeros(n, dtype=torch.long), "reward": torch.ones(1)} for n in (3, 1)]
    return [type(batch["reward"]) for batch in pack_sequences(rows, 2).batches]


def test_all_micro_batches_have_the_same_kinds_of_values(pool: WorkerPool) -> None:
    """A number of a sequence is not one of its token, even if the sequence has a single token."""
    assert pool.run(kinds_of_values, 1) == [[list, list]]


def mistakes() -> dict[str, str]:
    wrapped(config_of({}, 4), MODEL)
    found, items = {}, sequences()
    empty = [*items, {"input_ids": torch.zeros(0, dtype=torch.int64)}]
    for name, call in {
        "empty": lambda: pack_sequences(empty, 2),
        "long": lambda: pack_sequences(items, 2, max_tokens=29),
        "few": lambda: pack_sequences(items, 19),
        "list": lambda: pack_sequences([{"input_ids": [1, 2, 3]}], 1),
        "limit of 0": lambda: pack_sequences(items, 2, max_tokens=0),
        "no micro-batch": lambda: pack_sequences(items, 0),
        "no split": lambda: split_batch({"input_ids": torch.zeros(4, 8, dtype=torch.int64)}, 0),
        "keys": lambda: pack_sequences([*items, {"input_ids": torch.zeros(2, dtype=torch.int64)}], 2),
    }.items():
        try:
            call()
        except UserError as error:
            found[name] = str(error)
    found["default"] = str(len(split_batch({"input_ids": torch.zeros(4, 8, dtype=torch.int64)})))
    return found


def test_mistakes_are_one_sentence(pool: WorkerPool) -> None:
    (found,) = pool.run(mistakes, 1)
    for name, part in {
        "empty": "sequence 18 has no tokens",
        "long": "sequence 5 has 30 tokens, but max_tokens=29",
        "few": "18 sequences cannot fill 19 micro-batches",
        "list": "input_ids of sequence 0 is a list",
        "limit of 0": "sequence 0 has 9 tokens, but max_tokens=0",
        "no micro-batch": "micro_batches=0",
        "no split": "micro_batches=0",
        "keys": "sequences 0 and 18 has name",
        "default": "1",
    }.items():
        assert part in found[name]


def bins_of_many_sequences() -> tuple[int, int]:
    """Return how often sequences are distributed, and the bytes of a row's outputs that a rank sends."""
    setup_process_group_manager(1, 1, 1, 1)
    rows = [{"input_ids": torch.zeros(1 + i % 7, dtype=torch.long)} for i in range(500)]
    with mock.patch("picotron.sequences._balance", wraps=picotron.sequences._balance) as balance:
        packed = pack_sequences(rows, max_tokens=100)
    sent: list[int] = []

    def gather(everywhere: list[Any], found: Any, group: Any) -> None:
        sent.append(len(pickle.dumps(found)))
        everywhere[0] = found

    outputs = [torch.zeros(1, batch["input_ids"].size(1), 50) for batch in packed.batches]
    with mock.patch("torch.distributed.all_gather_object", gather):
        packed.unpack(outputs)
    return balance.call_count, sent[0]


def test_many_sequences_are_packed_and_sent_once(pool: WorkerPool) -> None:
    [(calls, sent)] = pool.run(bins_of_many_sequences, 1)
    assert calls < 10
    assert sent < 500 * (7 * 50 * 4 + 1000)
