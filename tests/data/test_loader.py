"""Micro-batches of masked documents and of samples: bounds, positions and weights, the same in every layout."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from conformance.oracle import assert_close, make_config, random_tokens
from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import MicroBatchDataLoader, data_fingerprint, split_train_eval
from picotron.data.rows import Rows, Samples, TextRows
from picotron.explain.fake_group import fake_rank
from picotron.process_group_manager import setup_process_group_manager

CPU = torch.device("cpu")
LENGTH, END = 12, 3
# dp, micro-batch, accumulation, cp, sharding: all have global batches of 12 rows
LAYOUTS = [
    (1, 12, 1, 1, "zigzag"),
    (1, 2, 6, 1, "zigzag"),
    (2, 3, 2, 1, "zigzag"),
    (2, 2, 3, 2, "zigzag"),
    (1, 4, 3, 3, "contiguous"),
    (1, 12, 1, 2, "contiguous"),
    (4, 1, 3, 1, "zigzag"),
]


def config_of(layout: tuple[int, int, int, int, str], **changes: Any) -> Config:
    dp, size, accumulation, cp, sharding = layout
    keys = {
        "distributed__dp_size": dp,
        "distributed__cp_size": cp,
        "distributed__cp_sharding": sharding,
        "training__seq_length": LENGTH,
        "training__micro_batch_size": size,
        "training__gradient_accumulation_steps": accumulation,
    }
    return make_config(**keys | changes)


def text_rows(end: int | None = END) -> TextRows:
    """Return rows of documents that end with END, most of them shorter than a row."""
    return TextRows(random_tokens(700, vocab_size=7), LENGTH, end)


def some_samples(longest: int = 9) -> Samples:
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, longest + 1, 300)
    total = lengths.sum()
    return Samples(rng.integers(1, 61, total).astype(np.uint16), rng.integers(0, 2, total).astype(np.uint8), lengths)


def sample_config(layout: tuple[int, int, int, int, str] = LAYOUTS[0], **changes: Any) -> Config:
    return config_of(layout, dataset__prompt_column="p", dataset__completion_column="c", **changes)


def read(config: Config, rows: Rows, steps: int, start: int = 0, batches: int = 1) -> list[dict[str, Any]]:
    """Return this rank's micro-batches of some steps."""
    loader = MicroBatchDataLoader(rows, config, CPU, start, batches=batches)
    assert loader.grad_acc_steps == batches * config.training.gradient_accumulation_steps
    return [next(loader) for _ in range(steps * loader.grad_acc_steps)]


def read_alone(config: Config, rows: Rows, steps: int) -> list[dict[str, Any]]:
    with fake_rank(0, config.distributed):
        return read(config, rows, steps)


def read_on_all_ranks(
    pool: WorkerPool, config: Config, rows: Rows, steps: int, start: int = 0, batches: int = 1
) -> list[list[dict[str, Any]]]:
    return pool.run(read_in_group, config.distributed.world_size, config, rows, steps, start, batches)


def read_in_group(config: Config, *arguments: Any) -> list[dict[str, Any]]:
    setup_process_group_manager(1, config.distributed.cp_size, 1, config.distributed.dp_size)
    return read(config, *arguments)


def unsharded(config: Config, ranks: list[list[dict[str, Any]]], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Join the tensors of all ranks into the rows of all steps, in the order of samples: (rows, T)."""
    dp, cp = config.distributed.dp_size, config.distributed.cp_size
    joined = {}
    for name in names:
        rows = []
        for i in range(len(ranks[0])):
            for d in range(dp):
                shards = [ranks[d * cp + c][i] for c in range(cp)]
                if config.distributed.cp_sharding == "contiguous" or cp == 1:
                    whole = torch.cat([shard[name] for shard in shards], 1)
                else:
                    firsts, lasts = zip(*(shard[name].chunk(2, dim=1) for shard in shards), strict=True)
                    whole = torch.cat([*firsts, *reversed(lasts)], 1)
                rows.append(whole)
        joined[name] = torch.cat(rows)
    return joined


# -------------------------------------------------------------------------------------------------- masked documents


def documents_in(row: list[int]) -> list[int]:
    """Return the lengths of the documents of a row, counted token by token."""
    lengths = [0]
    for i, token in enumerate(row):
        lengths[-1] += 1
        if token == END and i < len(row) - 1:
            lengths.append(0)
    return lengths


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_documents_end_after_the_end_of_sequence_token_and_with_the_row(pool: WorkerPool, layout: Any) -> None:
    config = config_of(layout)
    ranks = read_on_all_ranks(pool, config, text_rows(), 3)
    found = unsharded(config, ranks, ("input_ids", "position_ids"))
    lengths = [documents_in(row) for row in found["input_ids"].tolist()]
    assert max(map(len, lengths)) > 2
    assert found["position_ids"].tolist() == [[i for n in row for i in range(n)] for row in lengths]
    B, cp = config.training.micro_batch_size, config.distributed.cp_size
    for rank, batches in enumerate(ranks):
        for i, batch in enumerate(batches):
            first = (i * config.distributed.dp_size + rank // cp) * B
            documents = [n for row in lengths[first : first + B] for n in row]
            bounds = batch["cu_seqlens"]
            assert (bounds.dtype, bounds.device) == (torch.int32, CPU)
            assert bounds.tolist() == [sum(documents[:n]) for n in range(len(documents) + 1)]
            assert bounds[-1] == B * LENGTH


def test_masks_do_not_change_the_rows_or_the_fingerprint() -> None:
    config, plain, masked = config_of(LAYOUTS[1]), text_rows(end=None), text_rows()
    for a, b in zip(read_alone(config, plain, 3), read_alone(config, masked, 3), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("input_ids", "target_ids"))
    assert data_fingerprint(plain, config) == data_fingerprint(masked, config)


def test_without_masks_and_samples_a_micro_batch_has_no_other_tensors() -> None:
    config = config_of(LAYOUTS[0])
    first, second = read_alone(config, text_rows(end=None), 2)
    assert first.keys() == {"input_ids", "target_ids", "position_ids", "hidden_states"}
    assert first["position_ids"] is second["position_ids"]


def test_the_fingerprint_of_text_stays_that_of_older_checkpoints() -> None:
    rows = TextRows(random_tokens(), 16)
    assert data_fingerprint(rows, make_config()) == "e6b563a1100b6d2fe7dc17b8"
    assert data_fingerprint(rows, make_config(dataset__shuffle=False)) == "c02341bff22a0e73acadf780"


# ----------------------------------------------------------------------------------------------------------- samples


def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a value for each target that depends on it and its input."""
    return torch.sin(inputs * 7.0 + targets * 3.0).double()


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_give_the_mean_over_the_counted_targets(pool: WorkerPool, layout: Any, batches: int) -> None:
    """Mean over micro-batches and ranks of sum(weights * losses) = mean of the counted losses of a step's rows."""
    config = sample_config(layout)
    rows, _ = split_train_eval(some_samples(), config)
    assert rows.counts is not None
    ranks = read_on_all_ranks(pool, config, rows, 2, start=12 * 5, batches=batches)
    size = 12 * batches
    found = unsharded(config, ranks, ("input_ids", "target_ids", "target_weights"))
    micro_batches = batches * config.training.gradient_accumulation_steps
    for step in (0, 1):
        losses = [
            [(b["target_weights"] * loss_of(b["input_ids"], b["target_ids"])).sum().item() for b in rank]
            for rank in (r[step * micro_batches : (step + 1) * micro_batches] for r in ranks)
        ]
        inputs, targets, weights = (tensor[step * size : (step + 1) * size] for tensor in found.values())
        counted = weights > 0
        expected = loss_of(inputs, targets)[counted].mean().item()
        assert_close(float(np.mean(losses)), expected, relative=1e-12)
        assert len(set(weights[counted].tolist())) == 1
        assert weights.dtype == torch.float64
        total = micro_batches * config.distributed.dp_size * config.distributed.cp_size
        assert_close(weights.sum().item(), float(total), relative=1e-12)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_layout_reads_the_same_samples_also_after_resuming(pool: WorkerPool, workers: int) -> None:
    names = ("input_ids", "target_ids", "position_ids", "target_weights")
    everything = []
    for layout in LAYOUTS if workers == 0 else LAYOUTS[3:4]:
        config = sample_config(layout, dataset__num_workers=workers)
        rows, _ = split_train_eval(some_samples(), config)
        steps = 2 * len(rows) // 12 + 2  # crosses the end of two epochs
        whole = unsharded(config, read_on_all_ranks(pool, config, rows, steps), names)
        whole["target_weights"] = whole["target_weights"] > 0
        resumed = unsharded(config, read_on_all_ranks(pool, config, rows, steps - 4, start=4 * 12), names)
        assert all(torch.equal(resumed[name], whole[name][4 * 12 :]) for name in names[:3])
        everything.append(whole)
    for other in everything[1:]:
        assert all(torch.equal(other[name], everything[0][name]) for name in names)


def test_an_epoch_of_samples_has_every_counted_target_once() -> None:
    samples = some_samples()
    config = sample_config(dataset__shuffle=False)
    rows, _ = split_train_eval(samples, config)
    batches = read_alone(config, rows, len(rows) // 12)
    rest = [rows[i] for i in range(len(rows) // 12 * 12, len(rows))]
    counted = [b["target_ids"][b["target_weights"] > 0].tolist() for b in batches]
    counted += [row.target_ids[row.counted == 1].tolist() for row in rest]
    first = np.cumsum(samples.lengths) - samples.lengths
    is_target = samples.counted.astype(bool)
    is_target[first] = False  # nothing predicts the first token of a sample
    assert sorted(token for each in counted for token in each) == sorted(samples.tokens[is_target].tolist())


def test_each_sample_is_a_document_and_so_is_the_padding() -> None:
    config = sample_config(LAYOUTS[1])
    rows, _ = split_train_eval(some_samples(), config)
    for batch in read_alone(config, rows, 3):
        bounds = batch["cu_seqlens"].tolist()
        assert {0, LENGTH, 2 * LENGTH} <= set(bounds)
        ids, targets, weights = (
            batch[name].flatten().tolist() for name in ("input_ids", "target_ids", "target_weights")
        )
        positions = [i for start, end in itertools.pairwise(bounds) for i in range(end - start)]
        assert batch["position_ids"].flatten().tolist() == positions
        for start, end in itertools.pairwise(bounds):
            if ids[start] == 0:  # no sample has token 0
                assert end % LENGTH == 0
                assert not any(ids[start:end] + targets[start:end] + weights[start:end])
            else:
                assert ids[start + 1 : end] == targets[start : end - 1]


def test_attention_across_samples_is_a_choice() -> None:
    config = sample_config(dataset__mask_documents=False)
    rows, _ = split_train_eval(some_samples(), config)
    (batch,) = read_alone(config, rows, 1)
    assert batch.keys() == {"input_ids", "target_ids", "position_ids", "target_weights", "hidden_states"}
    assert batch["position_ids"].tolist() == [[*range(LENGTH)]] * 12


CHANGES: list[dict[str, Any]] = [
    {"training__seq_length": 16},
    {"training__seed": 1},
    {"dataset__shuffle": False},
    {"dataset__long_samples": "drop"},
    {"training__eval_frequency": 1, "training__eval_steps": 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_fingerprint_changes_with_the_rows(change: dict[str, Any]) -> None:
    def fingerprint(samples: Samples, **changes: Any) -> str:
        config = sample_config(**changes)
        return data_fingerprint(split_train_eval(samples, config)[0], config)

    samples = some_samples(longest=15)  # some are longer than a row
    before = fingerprint(samples)
    assert before == fingerprint(samples, distributed__cp_size=2, dataset__mask_documents=False)
    assert before != fingerprint(samples, **change)
    moved = samples.lengths.copy()
    moved[4:6] += [-1, 1]
    assert before != fingerprint(samples._replace(lengths=moved))
    tokens = samples.tokens.copy()
    tokens[3] += 1
    assert before != fingerprint(samples._replace(tokens=tokens))
    assert before != fingerprint(samples._replace(counted=1 - samples.counted))


def test_evaluation_samples_are_held_out_from_training(caplog: pytest.LogCaptureFixture) -> None:
    config = sample_config(training__micro_batch_size=2, training__eval_frequency=1, training__eval_steps=4)
    samples = some_samples()._replace(tokens=np.arange(some_samples().tokens.size, dtype=np.uint32))
    with caplog.at_level("INFO", "picotron"):
        training, evaluation = split_train_eval(samples, config)
    assert len(evaluation) == 8
    seen = [{int(t) for i in range(len(rows)) for t in rows[i].input_ids} - {0} for rows in (training, evaluation)]
    assert max(seen[0]) < min(seen[1])
    (message,) = caplog.messages
    assert message.startswith("300 samples in python-stdlib, 0 cut and ")
    assert f"dropped; {len(training) + 8:,} rows of 12 tokens, " in message
    assert message.endswith("% empty, 8 of them for evaluation")


def test_too_few_samples_are_rejected() -> None:
    samples = some_samples()
    config = sample_config(training__micro_batch_size=200)
    count = len(split_train_eval(samples, sample_config())[0])
    with pytest.raises(
        UserError,
        match=rf"has 300 samples, 38 of them dropped .*, enough for {count} sequences of 12 .* global batch needs 200",
    ):
        split_train_eval(samples, config)
    config = sample_config(training__micro_batch_size=90, training__eval_frequency=1, training__eval_steps=1)
    with pytest.raises(UserError, match=r"needs 90 and evaluation 90; .*, or fewer eval_steps"):
        split_train_eval(samples, config)
