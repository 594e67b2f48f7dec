"""Micro-batches of samples: bounds, positions and padding, and fingerprints, which change with the rows."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from conformance.oracle import make_config, random_tokens
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader, data_fingerprint, split_train_eval
from picotron.data.rows import Rows, Samples, TextRows
from picotron.explain.fake_group import fake_rank

CPU = torch.device("cpu")
LENGTH, END = 12, 3
# dp, micro-batch, accumulation, cp, sharding: all have global batches of 12 rows
LAYOUTS = [
    (1, 12, 1, 1, "zigzag"),
    (1, 2, 6, 1, "zigzag"),
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


# -------------------------------------------------------------------------------------------------- masked documents


def test_masks_do_not_change_the_rows_or_the_fingerprint() -> None:
    config, plain, masked = config_of(LAYOUTS[1]), text_rows(end=None), text_rows()
    for a, b in zip(read_alone(config, plain, 3), read_alone(config, masked, 3), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("input_ids", "target_ids"))
    assert data_fingerprint(plain, config) == data_fingerprint(masked, config)


def test_the_fingerprint_of_text_stays_that_of_older_checkpoints() -> None:
    rows = TextRows(random_tokens(), 16)
    assert data_fingerprint(rows, make_config()) == "e6b563a1100b6d2fe7dc17b8"
    assert data_fingerprint(rows, make_config(dataset__shuffle=False)) == "c02341bff22a0e73acadf780"


# ----------------------------------------------------------------------------------------------------------- samples


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
