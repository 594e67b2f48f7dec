"""Sequences that are packed into micro-batches: their outputs, the sizes of micro-batches, padding, and mistakes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import CPU, assert_close, make_config, oracle_model, our_model, tiny_llama
from tests.support.training import step_of, wrapped
from workbench.own_loops.batches import forward_batch, train_batch
from workbench.own_loops.log_probs import log_probs
from workbench.own_loops.sequences import pack_sequences
from workbench.pipelines.engine import make_evaluation, plan_pipeline

MODEL = tiny_llama(num_hidden_layers=4)
LENGTHS = (9, 3, 14, 1, 7, 30, 2, 11, 5, 6, 13, 4, 8, 1, 10, 12, 3, 17)


def sequences(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length + 1,), generator=draw) for length in lengths]
    return [{"input_ids": row[:-1], "target_ids": row[1:], "name": i} for i, row in enumerate(rows)]


def log_probs_of(head: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
    return log_probs(head, x, batch["target_ids"])


def run_packed(layout: dict[str, Any], options: dict[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    config = make_config(**layout, training__gradient_accumulation_steps=options.get("micro_batches", 4))
    model = wrapped(config, MODEL)
    packed = pack_sequences(sequences(lengths), cp_sharding=config.distributed.cp_sharding, **options)
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    before = packed.unpack(forward_batch(evaluate, model, packed.batches, log_probs_of, merge=list))
    outputs: list[Any] = []
    loss = train_batch(step_of(config, MODEL), model, packed.batches, outputs=outputs, post_hook=log_probs_of).loss
    numbers = [batch["name"] for batch in packed.batches]
    place = pgm.process_group_manager.dp_rank
    return {"loss": loss, "outputs": (before, packed.unpack(outputs or None)), "place": place, "numbers": numbers}


@pytest.mark.parametrize(
    ("layout", "options", "lengths"),
    [
        ({"dp_size": 3}, {"micro_batches": 4}, LENGTHS),
        ({"pp_size": 2, "pp_engine": "zbv", "tp_size": 2, "sequence_parallel": True}, {"micro_batches": 4}, LENGTHS),
        ({}, {"max_tokens": 31}, LENGTHS),
        # no two fit together, so one of four micro-batches has padding only
        ({"dp_size": 2, "cp_size": 2, "dp_engine": "zero3"}, {"max_tokens": 12}, (10, 7, 9)),
    ],
)
def test_packed_sequences_equal_transformers(
    pool: WorkerPool, layout: dict[str, Any], options: dict[str, int], lengths: Sequence[int]
) -> None:
    model = oracle_model(MODEL, our_model(MODEL, seed=42).state_dict())
    expected = []
    for each in sequences(lengths):
        logits = model(input_ids=each["input_ids"][None], use_cache=False).logits[0].detach()
        expected.append(-F.cross_entropy(logits, each["target_ids"], reduction="none"))
    ranks = math.prod(value for key, value in layout.items() if key.endswith("_size"))
    results = pool.run(run_packed, ranks, layout, options, lengths)
    for result in results:
        assert_close(result["loss"], -torch.cat(expected).mean().item(), what="loss")
        for outputs in result["outputs"]:
            for ours, theirs in zip(outputs or expected, expected, strict=True):
                assert_close(ours, theirs, what="log-probabilities")
    assert any(result["outputs"][0] for result in results)
    batches = list(itertools.chain(*{result["place"]: result["numbers"] for result in results}.values()))
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in batch) for batch in batches) <= options.get("max_tokens", 40)  # on average 39


def mistakes() -> list[tuple[str, str]]:
    """Return pairs: a part of the expected error, and the error."""
    setup_process_group_manager(1, 1, 1, 1)
    found, items = [], sequences()
    ids = {n: {"input_ids": torch.zeros(n, dtype=torch.int64)} for n in (0, 2)}
    for expected, rows, options in (
        ("sequence 18 has no tokens", [*items, ids[0]], {"micro_batches": 2}),
        ("sequence 5 has 30 tokens, but max_tokens=29", items, {"max_tokens": 29}),
        ("18 sequences cannot fill 19 micro-batches", items, {"micro_batches": 19}),
        ("input_ids of sequence 0 is a list", [{"input_ids": [1, 2, 3]}], {}),
        ("sequences 0 and 18 has name", [*items, ids[2]], {"micro_batches": 2}),
    ):
        with pytest.raises(UserError) as error:
            pack_sequences(rows, **options)  # type: ignore[arg-type]
        found.append((expected, str(error.value)))
    return found


def test_mistakes_are_named(pool: WorkerPool) -> None:
    assert [pair for pair in pool.run(mistakes, 1)[0] if pair[0] not in pair[1]] == []
