"""Steps and forward passes on a user's batches: results, order, merged outputs, and what is wrong in one sentence."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MistralConfig

from conformance.fuzz.losses import failing
from conformance.oracle import CPU, assert_close, make_config, oracle_model, our_model, tiny_llama
from conformance.training import Failure, all_stages, layout_name, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.batches import cross_entropy, forward_batch, normalise_weights, split_batch, train_batch
from picotron.console import UserError
from picotron.model.weights import main_grad
from picotron.optimizer import AdamW, update_weights
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.sequences import pack_sequences
from picotron.tensor_parallel.tp_communications import sum_over_ranks
from picotron.train_step import make_evaluation

MODEL = tiny_llama(num_hidden_layers=6)


def global_batch() -> dict[str, Any]:
    ids = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:], "number": torch.arange(8), "factor": 0.5}


def config_of(layout: dict[str, Any], **changes: Any) -> Any:
    changes |= {f"distributed__{key}": value for key, value in layout.items()}
    return make_config(
        **{"training__gradient_accumulation_steps": 4 // layout.get("dp_size", 1), "training__eval_steps": 1} | changes
    )


def loss_of_three_kinds(head: Any, x: Tensor, batch: dict[str, Any]) -> Tensor:
    """Compute a loss from the full logits, from log-probabilities, and from this rank's shard of the logits."""
    tokens, grid = head.vocabulary, pgm.process_group_manager
    logits, local = head(x), head.local_logits(x)
    assert_close(local.detach(), logits.detach()[..., tokens.start : tokens.start + tokens.rows])
    mean_logit = sum_over_ranks(local.sum(-1), grid.tp_group, sequence_parallel=False) / head.vocab_size
    full = F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten())
    log_probs = head.log_probs(x, batch["target_ids"])
    return full + batch["factor"] * log_probs.square().mean() + mean_logit.square().mean()


def run_batch(config: Any) -> dict[str, Any]:
    """Run both kinds of forward pass, then a step, on the same micro-batches."""
    model, grid = wrapped(config, MODEL), pgm.process_group_manager
    micro_batches = config.training.gradient_accumulation_steps
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    batches, losses = split_batch(global_batch(), micro_batches), [torch.zeros(1)]

    def hook(head: Any, x: Tensor, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"log_probs": head.log_probs(x, batch["target_ids"]), "number": batch["number"]}

    logits = forward_batch(evaluate, model, batches)
    outputs = forward_batch(evaluate, model, batches, hook)
    assert all(main_grad(parameter).count_nonzero() == 0 for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    loss, statistics = train_batch(step_of(config, MODEL), model, batches, loss_of_three_kinds, losses)
    assert statistics == {}
    return {
        "dp_rank": grid.dp_rank,
        "cp_rank": grid.cp_rank,
        "loss": loss,
        "losses": losses,
        "logits": logits,
        "outputs": outputs,
        "gradients": all_stages(model.module.module, "main_grad"),
    }


LAYOUTS: list[dict[str, Any]] = [  # the last stage is on the last rank, on the first one, and on several
    {},
    {"pp_size": 2, "dp_size": 2, "pp_engine": "1f1b"},
    {"pp_size": 2, "pp_engine": "interleaved_1f1b"},
    {"pp_size": 2, "tp_size": 2, "sequence_parallel": True, "pp_engine": "zbv"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_losses_outputs_and_gradients_equal_transformers(pool: WorkerPool, layout: dict[str, Any]) -> None:
    config, batch = config_of(layout), global_batch()
    model = oracle_model(MODEL, our_model(MODEL, seed=42).state_dict())
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    log_probs = logits.log_softmax(-1).gather(-1, batch["target_ids"][..., None])[..., 0]
    loss = (0.5 * log_probs.square() - log_probs + logits.mean(-1).square()).mean(1)
    loss.mean().backward()
    size, holders = layout.get("dp_size", 1), 0
    for result in pool.run(run_batch, config.distributed.world_size, config):
        assert_close(result["loss"], loss.mean().item(), what="loss")
        for name, parameter in model.named_parameters():
            assert_close(result["gradients"][name], parameter.grad, what=name)
        if result["logits"] is None:
            assert result["losses"] == []
            assert result["outputs"] is None
            continue
        holders += 1
        own = torch.arange(8).view(-1, size, 2)[:, result["dp_rank"]].flatten()  # the rows of this dp rank
        assert_close(torch.stack(result["losses"]), loss[own].detach().view(-1, 2).mean(1), what="losses")
        assert_close(result["logits"], logits[own].detach(), what="logits")
        assert_close(result["outputs"]["log_probs"], log_probs[own].detach(), what="log_probs")
        assert result["outputs"]["number"].tolist() == own.tolist()
    assert holders == layout.get("tp_size", 1) * size


def in_groups(layout: dict[str, Any]) -> None:
    config = config_of(layout)
    wrapped(config, MODEL)


def message(action: Any) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def mistakes(layout: dict[str, Any]) -> dict[str, str]:
    """Return the sentence of each mistake on this rank."""
    config = config_of(layout)
    model, step = wrapped(config, MODEL), step_of(config, MODEL)
    parts = split_batch(global_batch(), 4)
    zeros = [part | {"target_weights": torch.zeros(2, 16)} for part in parts]
    rows = torch.tensor([0, 16, 32], dtype=torch.int32)

    def train(batches: Any, loss_fn: Any = cross_entropy, **options: Any) -> str:
        model.zero_grad()
        return message(lambda: train_batch(step, model, batches, loss_fn, **options))

    def returns(change: Any) -> str:
        return train(parts, lambda head, x, batch: change(cross_entropy(head, x, batch)))

    def changed(**changes: Any) -> list[dict[str, Any]]:
        return [parts[0] | changes, *parts[1:]]

    def names(head: Any, x: Tensor, batch: dict[str, Any]) -> Any:
        loss = cross_entropy(head, x, batch)
        return loss, 1.0, {f"{int(batch['number'][0])}": loss}

    found = {
        "no batches": train([]),
        "dict": train(parts[0]),
        "generator": train(iter(parts)),
        "list of lists": train([[1, 2]]),
        "boundary without dimensions": train(changed(cu_seqlens=torch.tensor(32))),
        "no positions": train([{"input_ids": parts[0]["input_ids"]}]),
        "one dimension": train(changed(input_ids=torch.arange(16))),
        "target shape": train(changed(target_ids=torch.zeros(2, 15, dtype=torch.int64))),
        "some weights": train([*parts[:-1], parts[-1] | {"target_weights": torch.ones(2, 16)}]),
        "no weight": train(zeros),
        "scope": train(zeros, scope="rank"),
        "last boundary": train(changed(cu_seqlens=rows[:-1])),
        "row boundary": train(changed(cu_seqlens=rows[[0, 2]])),
        "order": train(changed(cu_seqlens=torch.tensor([0, 20, 16, 32]))),
        "empty rows": train(changed(input_ids=torch.zeros(2, 0, dtype=torch.int64))),
        "input ids": train(changed(input_ids=parts[0]["input_ids"] + 30)),
        "target ids": train(changed(target_ids=torch.full((2, 16), 9999))),
        "negative ids": train(changed(target_ids=torch.full((2, 16), -1))),
        "dtype": train(changed(input_ids=torch.zeros(2, 16))),
        "nothing counts": train([part | {"target_ids": torch.full((2, 16), -100)} for part in parts]),
        "rows": message(lambda: split_batch(global_batch(), 3)),
        "lengths": message(lambda: split_batch(global_batch() | {"number": torch.arange(7)}, 4)),
        "list of targets": train(changed(target_ids=[[1]])),
        "list of boundaries": train(changed(cu_seqlens=[0, 16, 32])),
        "boundaries in float": train(changed(cu_seqlens=rows.float())),
        "left padding": train(changed(attention_mask=torch.tensor([[1] * 16, [0] * 3 + [1] * 13]))),
        "right padding": train(changed(attention_mask=torch.tensor([[1] * 16, [1] * 13 + [0] * 3]))),
        "nan weight": train([part | {"target_weights": torch.full((2, 16), torch.nan)} for part in parts]),
        "split: left padding": message(
            lambda: split_batch(global_batch() | {"attention_mask": torch.arange(16).repeat(8, 1)}, 4)
        ),
        "split: no ids": message(lambda: split_batch({"labels": torch.zeros(8, 16)}, 4)),
        "split: one dimension": message(lambda: split_batch({"input_ids": torch.arange(16)}, 4)),
        "split: list": message(lambda: split_batch({"input_ids": [[1, 2]]}, 4)),
    }
    if not layout:
        found |= {
            "no scalar": train(parts, lambda head, x, batch: head.log_probs(x, batch["target_ids"])),
            "no tensor": train(parts, lambda head, x, batch: 1.0),
            "own weights": train(parts, lambda head, x, batch: (cross_entropy(head, x, batch), 0.0, {})),
            "names": train(parts, names),
            "pair": returns(lambda loss: (loss, 1.0)),
            "detached": returns(lambda loss: loss.detach()),
            "vector": returns(lambda loss: (loss, 1.0, {"rows": loss.expand(2)})),
            "text": returns(lambda loss: (loss, "1", {})),
            "number as a name": returns(lambda loss: (loss, 1, {1: loss, "a": loss})),
            "numbers": returns(lambda loss: (loss, 1, {"loss": 3.0, "weight": 5, "step": loss})),
            "labels": train(
                [{("labels" if key == "target_ids" else key): part[key] for key in part} for part in parts]
            ),
        }
        found["twice"] = [train(parts), message(lambda: train_batch(step, model, parts))][1]
        model.module.module.lm_head.weight.requires_grad_(False)
        found["frozen later"] = train(parts)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        found["all frozen"] = train(parts)
    else:
        found["pipeline count"] = train(parts[:3])
    return found


SENTENCES = {
    "no batches": r"there are no micro-batches; pass at least one",
    "dict": r"the micro-batches are a dict; pass a list of dicts, see split_batch",
    "generator": r"the micro-batches are a list_iterator; pass a list of dicts, see split_batch",
    "list of lists": r"micro-batch 0 is a list; pass a dict of tensors, see split_batch",
    "boundary without dimensions": r"micro-batch 0: cu_seqlens have shape \[\]; give them one dimension",
    "number as a name": r"loss_fn returned a statistic whose name is 1; use a string",
    "no positions": r"micro-batch 0 has no tensor 'position_ids'; add one, or use split_batch",
    "one dimension": r"micro-batch 0: input_ids have shape \[16\], but they must be \(B, T\); give them two .*",
    "target shape": r"micro-batch 0: target_ids have shape \[2, 15\], but input_ids \[2, 16\]; make them equal",
    "some weights": r"only one of the micro-batches 0 and 3 has target_weights; add them to all or none",
    "no weight": r"the target_weights of the global batch sum to 0, .* needs a positive sum; give at least one .*",
    "scope": r"scope='rank' is unknown; use 'global' or 'dp_rank'",
    "last boundary": r"micro-batch 0: cu_seqlens should ascend from 0 to 32, .* not \[0, 16\]",
    "row boundary": r"micro-batch 0: cu_seqlens lack 16, where a row begins; a document cannot cross rows",
    "order": r"micro-batch 0: cu_seqlens should ascend from 0 to 32, .* not \[0, 20, 16, 32\]",
    "empty rows": r"micro-batch 0: input_ids have shape \[2, 0\], .* neither of which is 0",
    "input ids": r"micro-batch 0: input_ids have \d+, but the model's vocab_size is 61; use ids from 0 to 60",
    "target ids": r"micro-batch 0: target_ids have 9999, .* use ids from 0 to 60, or -100 for a target that does not count",
    "negative ids": r"micro-batch 0: target_ids have -1, .* or -100 for a target that does not count",
    "dtype": r"micro-batch 0: input_ids have dtype torch.float32, but ids are integers; convert them to torch.int64",
    "nothing counts": r"the target_weights of the global batch sum to 0, but their mean needs a positive sum; .*",
    "rows": r"8 sequences cannot be divided into 3 micro-batches on each of 1 data-parallel ranks; use a multiple of 3",
    "lengths": r"number has 7 sequences, but input_ids 8; make them equal",
    "no scalar": r"loss_fn returned a loss of shape \[2, 16\], but it must be a scalar tensor; sum the losses .*",
    "no tensor": r"loss_fn returned a loss as a float, but it must be a scalar tensor; sum the losses of the tokens",
    "own weights": r"the weights that loss_fn returned sum to 0; their sum must be positive",
    "names": r"loss_fn returned statistics with different names for two micro-batches; return the same names for all",
    "list of targets": r"micro-batch 0: target_ids are a list, not a tensor; convert them with torch.tensor",
    "list of boundaries": r"micro-batch 0: cu_seqlens are a list, not a tensor; convert them with torch.tensor",
    "boundaries in float": r"micro-batch 0: cu_seqlens have dtype torch.float32, but they are integers; convert them .*",
    "left padding": r"micro-batch 0: attention_mask hides tokens before others, .*; pad rows on the right, or use .*",
    "right padding": r"no error",
    "nan weight": r"micro-batch 0: target_weights have a NaN or an infinite number; correct them",
    "split: left padding": r"attention_mask hides tokens before others, .*; pad rows on the right, or use .*",
    "split: no ids": r"input_ids should be a tensor \(G, T\) of G sequences, not a NoneType; stack the sequences",
    "split: one dimension": r"input_ids should be a tensor \(G, T\) of G sequences, not of shape \[16\]; stack .*",
    "split: list": r"input_ids should be a tensor \(G, T\) of G sequences, not a list; stack the sequences",
    "pair": r"loss_fn returned a tuple of 2, but it must return a loss, or \(loss, weight, statistics\) with a dict .*",
    "detached": r"loss_fn returned a loss without a gradient; .* compute the loss from x without detach",
    "vector": r"loss_fn returned the statistic 'rows' of shape \[2\], but it must be a number or a scalar tensor; sum it",
    "text": r"loss_fn returned a weight as a str, but it must be a number or a scalar tensor; sum it",
    "numbers": r"no error",
    "labels": r"a micro-batch has no target_ids, which the cross entropy needs: for each token, the id of the next",
    "twice": r"the gradients of an earlier train_batch are still there; call update_weights or optimizer.zero_grad .*",
    "frozen later": r"no error",
    "all frozen": r"loss_fn returned a loss without a gradient; unfreeze a parameter, or .*",
    "pipeline count": r"the schedule is for 4 micro-batches, not 3; make them equal",
}


@pytest.mark.parametrize("layout", [{}, {"pp_size": 2, "pp_engine": "interleaved_1f1b"}], ids=layout_name)
def test_each_mistake_has_a_sentence_on_every_rank(pool: WorkerPool, layout: dict[str, Any]) -> None:
    for found in pool.run(mistakes, layout.get("pp_size", 1), layout):
        assert len(found) >= 14
        for name, sentence in found.items():
            assert re.fullmatch(SENTENCES[name], sentence), f"{name}: {sentence}"


def step_after_a_failure(config: Any, where: str) -> dict[str, Any]:
    """Return the results of a step after one that failed in its last micro-batch, if `where` is not empty."""
    model, step = wrapped(config, MODEL), step_of(config, MODEL)
    parts = split_batch(global_batch(), config.training.gradient_accumulation_steps)
    if where:
        with pytest.raises(Failure):
            train_batch(step, model, parts, failing(cross_entropy, where, len(parts)))
    loss = train_batch(step, model, parts).loss
    return {"loss": loss, **all_stages(model.module.module, "main_grad")}


@pytest.mark.parametrize("engine", ["naive", "bucket", "zero1", "zero3"])
def test_a_step_that_fails_leaves_nothing_behind(pool: WorkerPool, engine: str) -> None:
    config = config_of({"dp_size": 2, "dp_engine": engine})
    expected = pool.run(step_after_a_failure, 2, config, "")[0]
    for where in ("forward", "backward"):
        for name, number in pool.run(step_after_a_failure, 2, config, where)[0].items():
            assert_close(number, expected[name], what=f"{where}: {name}")


def different_batches(layout: dict[str, Any], what: str) -> str:
    """Return the error if rank 1 has other micro-batches than rank 0."""
    config = config_of(layout)
    model, step, rank = wrapped(config, MODEL), step_of(config, MODEL), pgm.process_group_manager.global_rank
    parts = split_batch(global_batch(), config.training.gradient_accumulation_steps)
    if rank == 1 and what == "count":
        parts = parts[1:]
    elif rank == 1 and what != "outputs":
        changes = {"target_weights": torch.ones(2, 16)} if what == "weights" else {what: parts[0][what].flip(0)}
        parts = [part | changes for part in parts]
    outputs: list[Any] | None = [] if rank == 1 and what == "outputs" else None
    return message(lambda: train_batch(step, model, parts, outputs=outputs))


@pytest.mark.parametrize(
    ("layout", "what", "sentence"),
    [
        ({"pp_size": 2}, "input_ids", "input_ids of micro-batch 0 differ between ranks 0 and 1, which process the same tokens; .*"),
        ({"tp_size": 2}, "target_ids", "target_ids of micro-batch 0 differ between ranks 0 and 1, .*"),
        ({"dp_size": 2}, "input_ids", "no error"),
        ({"dp_size": 2}, "count", "rank 0 has 2 micro-batches, but rank 1 has 1; pass the same number on all ranks"),
        ({"tp_size": 2}, "outputs", "only one of the ranks 0 and 1 has a list of outputs; pass one on all ranks or .*"),
        ({"dp_size": 2}, "weights", "only one of the ranks 0 and 1 has target_weights; add them on all ranks or on none"),
    ],
)  # fmt: skip
def test_batches_that_should_be_equal_are_compared(
    pool: WorkerPool, layout: dict[str, Any], what: str, sentence: str
) -> None:
    for found in pool.run(different_batches, 2, layout, what):
        assert re.fullmatch(sentence, found)


def sequence_of_six() -> str:
    config = config_of({"tp_size": 4, "sequence_parallel": True}, training__seq_length=8)
    model_config = tiny_llama(num_attention_heads=4, num_key_value_heads=4)
    model, step = wrapped(config, model_config), step_of(config, model_config)
    ids = torch.zeros(4, 6, dtype=torch.int64)
    batches = split_batch({"input_ids": ids, "target_ids": ids}, 2)
    return message(lambda: train_batch(step, model, batches))


def test_a_length_that_sequence_parallelism_cannot_divide_is_an_error(pool: WorkerPool) -> None:
    for sentence in pool.run(sequence_of_six, 4):
        assert sentence == (
            "micro-batch 0 has 6 tokens per sequence on a context-parallel rank, which sequence parallelism cannot divide "
            "over 4 tensor-parallel ranks; use a multiple of 4"
        )


def zero_rank() -> str:
    """Return the error if one dp rank's targets have no weight."""
    in_groups({"dp_size": 2})
    rank = pgm.process_group_manager.dp_rank
    batches = [{"target_weights": torch.full((2, 4), float(rank))}]
    assert normalise_weights(batches)[0]["target_weights"].sum() == 2 * rank  # the global scope can do without it
    assert "sum to -16" in message(lambda: normalise_weights([{"target_weights": torch.full((2, 4), -1.0)}]))
    return message(lambda: normalise_weights(batches, "dp_rank"))


def test_a_dp_rank_without_weights_is_an_error_on_all_ranks(pool: WorkerPool) -> None:
    for sentence in pool.run(zero_rank, 2):
        assert "the target_weights of a data-parallel rank sum to 0" in sentence


def names_by_rank() -> str:
    config = config_of({"dp_size": 2})
    model, rank = wrapped(config, MODEL), pgm.process_group_manager.dp_rank

    def loss_fn(head: Any, x: Tensor, batch: dict[str, Any]) -> Any:
        return cross_entropy(head, x, batch), 1.0, {f"n{rank}": 1.0}

    return message(lambda: train_batch(step_of(config, MODEL), model, split_batch(global_batch(), 2), loss_fn))


def test_statistics_with_other_names_on_another_rank_are_an_error(pool: WorkerPool) -> None:
    for sentence in pool.run(names_by_rank, 2):
        assert sentence == "loss_fn returned the statistic 'n0' on some ranks only; return it on all of them"


def unfrozen_later(dp_engine: str) -> str:
    config = config_of({"dp_engine": dp_engine})
    model, batches = wrapped(config, MODEL), split_batch(global_batch(), 4)
    optimizer, weight = AdamW(model.parameters(), config.training, False), model.module.module.model.norm.weight
    before = optimizer.masters[weight].clone()
    weight.requires_grad_(False)
    train_batch(step_of(config, MODEL), model, batches)
    update_weights(model, optimizer, 1.0)
    assert optimizer.masters[weight].equal(before)
    weight.requires_grad_(True)
    return message(lambda: train_batch(step_of(config, MODEL), model, batches))


@pytest.mark.parametrize("dp_engine", ["bucket", "zero3"])
def test_a_parameter_that_was_frozen_stays_frozen(pool: WorkerPool, dp_engine: str) -> None:
    (sentence,) = pool.run(unfrozen_later, 1, dp_engine)
    assert re.fullmatch(r"model.norm.weight requires a gradient, but was frozen before; unfreeze .*", sentence)


def windowed(tokens: int, packed: bool) -> str:
    model_config = MistralConfig(**tiny_llama().to_dict() | {"model_type": "mistral", "sliding_window": 8})
    config = config_of({}, training__seq_length=8)
    ids = torch.zeros(4, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "target_ids": ids}
    if packed:
        batch["cu_seqlens"] = torch.arange(0, 4 * tokens + 1, 8)
    model = wrapped(config, model_config)
    return message(lambda: train_batch(step_of(config, model_config), model, split_batch(batch, 4)))


@pytest.mark.parametrize(
    ("tokens", "packed", "sentence"),
    [
        (8, False, "no error"),
        (16, True, "no error"),
        (16, False, "micro-batch 0: a sequence of 16 tokens is longer than the model's sliding_window=8, which .*"),
    ],
)
def test_sequences_that_exceed_a_window_are_an_error(
    pool: WorkerPool, tokens: int, packed: bool, sentence: str
) -> None:
    (found,) = pool.run(windowed, 1, tokens, packed)
    assert re.fullmatch(sentence, found)


def other_sharding(kind: str) -> str:
    config = config_of({"cp_size": 2, "cp_sharding": "contiguous"})
    model, batch = wrapped(config, MODEL), {key: global_batch()[key] for key in ("input_ids", "target_ids")}
    if kind == "packed":
        batches = pack_sequences([{key: batch[key][i] for key in batch} for i in range(8)], 4).batches
    else:
        rows, tokens = batch["input_ids"].shape
        batch |= {"cu_seqlens": torch.arange(0, rows * tokens + 1, tokens // 2)} if kind == "documents" else {}
        batches = split_batch(batch, 4)
    return message(lambda: train_batch(step_of(config, MODEL), model, batches))


@pytest.mark.parametrize("kind", ["rows", "documents", "packed"])
def test_batches_that_are_sharded_unlike_the_model_are_an_error(pool: WorkerPool, kind: str) -> None:
    for sentence in pool.run(other_sharding, 2, kind):
        assert sentence == (
            "micro-batch 0 was split with cp_sharding='zigzag', but the config has 'contiguous'; pass "
            "cp_sharding='contiguous' to split_batch or pack_sequences"
        )
