"""Steps and forward passes on a user's batches: losses and outputs in order, errors that every rank raises, and batches
that are packed from sequences.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from conformance.case import sizes_of
from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from tests.support.messages import error_of
from tests.support.oracle import CPU, assert_close, make_config, oracle_model, tiny_llama
from tests.support.training import step_of, wrapped
from workbench.own_loops.batches import cross_entropy, forward_batch, split_batch, train_batch
from workbench.own_loops.log_probs import log_probs
from workbench.own_loops.sequences import pack_sequences
from workbench.pipelines.engine import make_evaluation, plan_pipeline

MODEL, TOKENS = tiny_llama(num_hidden_layers=6), ("input_ids", "target_ids", "position_ids")


def global_batch() -> dict[str, Any]:
    ids = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:], "number": torch.arange(8), "factor": 0.5}


def config_of(layout: str) -> Any:
    return make_config(f"{layout} m{4 // sizes_of(layout)['dp']}")


def run_batch(config: Any) -> dict[str, Any]:
    """Run both kinds of forward pass, then a step, on the same micro-batches."""
    model, losses = wrapped(config, MODEL), [torch.zeros(1)]
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    batches = split_batch(global_batch(), config.training.gradient_accumulation_steps)

    def hook(head: Any, x: Tensor, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"log_probs": log_probs_of(head, x, batch), "number": batch["number"]}

    def loss_fn(head: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
        return batch["factor"] * log_probs_of(head, x, batch).mean()

    found = {
        "logits": forward_batch(evaluate, model, batches),
        "outputs": forward_batch(evaluate, model, batches, hook),
    }
    train_batch(step_of(config, MODEL), model, batches, loss_fn, losses)
    return found | {"losses": losses}


def log_probs_of(head: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
    return log_probs(head, x, batch["target_ids"])


LAYOUTS = [  # the last stage is on the last ranks, and on the first ones
    "pp2 dp2 1f1b",
    "pp2 tp2 sp zbv",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_of_a_rank_are_those_of_its_rows_in_order(pool: WorkerPool, layout: str) -> None:
    config, batch = config_of(layout), global_batch()
    model = oracle_model(MODEL)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits.detach()
    log_probs = logits.log_softmax(-1).gather(-1, batch["target_ids"][..., None])[..., 0]
    rows = []  # of each rank with the last stage
    for result in pool.run(run_batch, config.distributed.world_size, config):
        if result["logits"] is None:
            assert (result["losses"], result["outputs"]) == ([], None)
            continue
        rows.append(own := result["outputs"]["number"].tolist())
        assert_close(torch.stack(result["losses"]), log_probs[own].view(-1, 32).mean(1) / 2, what="losses")
        assert_close(result["logits"], logits[own], what="logits")
        assert_close(result["outputs"]["log_probs"], log_probs[own], what="log_probs")
    assert sorted(itertools.chain(*rows)) == sorted(list(range(8)) * sizes_of(layout)["tp"])


# -------------------------------------------------------------------------------------------------------------- errors


Batches = list[dict[str, Any]]
Change = Callable[[int, Batches], Batches]


def every(**changes: Any) -> Change:
    return lambda rank, parts: [part | changes for part in parts]


def rolled(name: str) -> Change:
    return lambda rank, parts: [part | {name: part[name].roll(rank)} for part in parts]


def named(head: Any, x: Tensor, batch: dict[str, Any]) -> Any:
    return cross_entropy(head, x, batch), 1.0, {batch.get("name", "n"): 1.0}


def repeated(rank: int, parts: Batches) -> Batches:
    return [{name: torch.cat([part[name]] * 2, 1) for name in TOKENS} for part in parts]


# The layout, what a rank makes of its micro-batches, the sentence, and options of `train_batch`. The model has a window
# of 16 tokens, as many as a sequence.
PP, ONES, IGNORED = "pp2 interleaved_1f1b", torch.ones(2, 16), torch.full((2, 16), -100)
MISTAKES: list[Any] = [
    (PP, lambda rank, parts: [], "at least 1"),
    (PP, every(target_ids=torch.full((2, 16), 9999)), "target_ids have 9999"),
    (PP, every(target_ids=torch.zeros(2, 15, dtype=torch.int64)), "target_ids have shape [2, 15]"),
    (PP, every(cu_seqlens=torch.tensor([0, 16])), "from 0 to 32"),
    (PP, every(attention_mask=torch.tensor([[1] * 16, [0] * 3 + [1] * 13])), "hides tokens before others"),
    (PP, lambda rank, parts: [*parts[:-1], parts[-1] | {"target_weights": ONES}], "only some micro-batches have target_weights"),
    (PP, every(target_ids=IGNORED), "global batch sum to 0"),
    (PP, lambda rank, parts: [{"target_ids": part["target_ids"]} for part in parts], "(B, T), but found none"),
    (PP, every(target_weights=ONES), "scope='rank'", {"scope": "rank"}),
    (PP, lambda rank, parts: split_batch(global_batch(), 3), "8 sequences"),
    (PP, lambda rank, parts: parts[:3], "for 4 micro-batches, not 3"),
    (PP, rolled("input_ids"), "input_ids of micro-batch 0 differs"),
    ("tp2", rolled("target_ids"), "target_ids of micro-batch 0 differs"),
    ("cp2", lambda rank, parts: every(cu_seqlens=torch.tensor([0, 4 + rank, 16, 32]))(rank, parts), "cu_seqlens of micro-batch 0 differs"),
    ("tp2 sp", lambda rank, parts: [{name: part[name][:, :15] for name in TOKENS} for part in parts], "15 tokens on this rank, which sequence_parallel divides"),
    ("dp2", rolled("input_ids"), "no error"),
    ("dp2", lambda rank, parts: parts[rank:], "have [2, 1] micro-batches"),
    ("dp2", lambda rank, parts: every(target_weights=(rank - 1) * ONES)(rank, parts), "a data-parallel rank sum to -64", {"scope": "dp_rank"}),
    ("dp2", lambda rank, parts: every(name=f"n{rank}")(rank, parts), "'n0' for some micro-batches only", {"loss_fn": named}),
    ("dp2", lambda rank, parts: every(cu_seqlens=torch.tensor([0, 16, 32, 48, 64]))(rank, repeated(rank, parts)), "no error"),
    ("dp2", repeated, "32 tokens is longer than the model's sliding_window=16"),
    ("cp2 contiguous", every(), "cp_sharding='zigzag', but the config has 'contiguous'"),
    ("", lambda rank, parts: [*parts[:-1], parts[-1] | {"name": "other"}], "'n' for some micro-batches only", {"loss_fn": named}),
    ("", every(), "without a gradient", {"loss_fn": lambda *x: cross_entropy(*x).detach()}),
    ("", every(), "sum to 0", {"loss_fn": lambda *x: (cross_entropy(*x), 0.0, {})}),
]  # fmt: skip


def error_of_batches(number: int) -> str:
    """Return the error of a case of MISTAKES."""
    layout, change, _, *options = MISTAKES[number]
    config, model_config = config_of(layout), tiny_llama("mistral", sliding_window=16, num_hidden_layers=6)
    model, step = wrapped(config, model_config), step_of(config, model_config)
    parts = split_batch(global_batch(), config.training.gradient_accumulation_steps)
    return error_of(lambda: train_batch(step, model, change(dist.get_rank(), parts), **dict(*options)))


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_batches_that_do_not_fit_are_an_error_on_every_rank(pool: WorkerPool, number: int) -> None:
    layout, _, sentence, *_ = MISTAKES[number]
    for found in pool.run(error_of_batches, make_config(layout).distributed.world_size, number):
        assert sentence in found


def train_without_zero_grad() -> tuple[str, str]:
    """Return the error of a second step without `zero_grad`, and that of a third one after parameters were frozen."""
    config = config_of("")
    model, step, parts = wrapped(config, MODEL), step_of(config, MODEL), split_batch(global_batch(), 4)
    train_batch(step, model, parts)
    second = error_of(lambda: train_batch(step, model, parts))
    model.zero_grad()
    model.requires_grad_(False)
    return second, error_of(lambda: train_batch(step, model, parts))


def test_a_step_needs_gradients_that_are_zero_and_parameters_that_have_some(pool: WorkerPool) -> None:
    ((second, third),) = pool.run(train_without_zero_grad, 1)
    assert "gradients of an earlier train_batch" in second
    assert "was frozen after" in third


# ---------------------------------------------------------------------------------------------------- packed sequences

LENGTHS = (9, 3, 14, 1, 7, 30, 2, 11, 5, 6, 13, 4, 8, 1, 10, 12, 3, 17)


def sequences(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length + 1,), generator=draw) for length in lengths]
    return [{"input_ids": row[:-1], "target_ids": row[1:], "name": i} for i, row in enumerate(rows)]


def run_packed(layout: str, options: dict[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    config = make_config(f"{layout} m{options.get('micro_batches', 4)}")
    model = wrapped(config, MODEL)
    packed = pack_sequences(sequences(lengths), cp_sharding=config.distributed.cp_sharding, **options)
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    outputs = packed.unpack(forward_batch(evaluate, model, packed.batches, log_probs_of, merge=list))
    loss = train_batch(step_of(config, MODEL), model, packed.batches).loss
    longest = max(sum(lengths[i] for i in batch["name"]) for batch in packed.batches)
    return {"loss": loss, "outputs": outputs, "longest": longest}


@pytest.mark.parametrize(
    ("layout", "options", "lengths"),
    [
        ("pp2 zbv tp2 sp", {"micro_batches": 4}, LENGTHS),
        ("dp3", {"max_tokens": 31}, LENGTHS),
        # no two fit together, so one of four micro-batches has padding only
        ("dp2 cp2 zero3", {"max_tokens": 12}, (8, 7, 9)),
    ],
)
def test_packed_sequences_equal_transformers(
    pool: WorkerPool, layout: str, options: dict[str, int], lengths: Sequence[int]
) -> None:
    model = oracle_model(MODEL)
    expected = []
    for each in sequences(lengths):
        logits = model(input_ids=each["input_ids"][None], use_cache=False).logits[0].detach()
        expected.append(-F.cross_entropy(logits, each["target_ids"], reduction="none"))
    results = pool.run(run_packed, make_config(layout).distributed.world_size, layout, options, lengths)
    for result in results:
        assert_close(result["loss"], -torch.cat(expected).mean().item(), what="loss")
        for ours, theirs in zip(result["outputs"] or expected, expected, strict=True):
            assert_close(ours, theirs, what="log-probabilities")
    assert any(result["outputs"] for result in results)
    assert max(result["longest"] for result in results) <= options.get("max_tokens", 40)  # on average 39


IDS = {n: {"input_ids": torch.zeros(n, dtype=torch.int64)} for n in (0, 2)}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([*sequences(), IDS[0]], {"micro_batches": 2}, "sequence 18 has no tokens"),
        (sequences(), {"max_tokens": 29}, "sequence 5 has 30 tokens, but max_tokens=29"),
        (sequences(), {"micro_batches": 19}, "18 sequences cannot fill 19 micro-batches"),
        ([{"input_ids": [1, 2, 3]}], {}, "input_ids of sequence 0 is a list"),
        ([*sequences(), IDS[2]], {"micro_batches": 2}, "sequences 0 and 18 has name"),
    ],
)
def test_mistakes_in_sequences_are_named(rows: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack_sequences(rows, **options)
