"""Micro-batches: the order of samples does not depend on the layout, and a resume evaluates only what was held out."""

from typing import Any

import numpy as np
import pytest
import torch

from conformance.oracle import make_config, random_tokens
from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import (
    HeldOut,
    MicroBatchDataLoader,
    data_fingerprint,
    epoch_order,
    rows_to_hold_out,
    split_train_eval,
)
from picotron.data.rows import Samples, Text, TextRows
from picotron.process_group_manager import setup_process_group_manager

CPU = torch.device("cpu")


def rows(config: Config, steps: int, start: int) -> list[list[int]]:
    """Return the first input token of each row of each micro-batch; token i of the stream is i."""
    setup_process_group_manager(1, 1, 1, config.distributed.dp_size)
    loader = MicroBatchDataLoader(TextRows(np.arange(1001, dtype=np.uint16), 10), config, CPU, start)
    batches = [next(loader) for _ in range(steps * loader.grad_acc_steps)]
    for batch in batches:
        first = batch["input_ids"][:, :1]
        assert (batch["input_ids"] == first + np.arange(10)).all()
        assert (batch["target_ids"] == first + np.arange(1, 11)).all()
        assert (batch["position_ids"] == np.arange(10)).all()
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def sample_config(**changes: Any) -> Config:
    return make_config(**{"training__seq_length": 10} | changes)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_read_the_rows_of_a_global_batch_in_order(pool: WorkerPool, workers: int) -> None:
    """Sample s * 12 + (i * 2 + rank) * 3 + b is row b of micro-batch i of a rank; 30 steps cross 3 epochs."""
    order = [10 * int(w) for epoch in range(4) for w in epoch_order(100, 42, epoch)]
    config = sample_config(
        distributed__dp_size=2,
        training__micro_batch_size=3,
        training__gradient_accumulation_steps=2,
        dataset__num_workers=workers,
    )
    for rank, got in enumerate(pool.run(rows, 2, config, 17, 12 * 13)):
        for k, batch in enumerate(got):
            first = (13 + k // 2) * 12 + (k % 2 * 2 + rank) * 3
            assert batch == order[first : first + 3]


def test_an_epoch_has_every_window_once_and_epochs_differ() -> None:
    orders = [epoch_order(1000, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert (orders[0] == epoch_order(1000, 1, 0)).all()
    assert orders[0][:5].tolist() == [458, 323, 622, 828, 93]  # fixed, because resuming relies on this order


def test_too_little_data_is_rejected() -> None:
    text = Text(np.arange(1001, dtype=np.uint16))
    with pytest.raises(UserError, match=r"1,001 tokens, enough for 100 .* one global batch needs 101"):
        split_train_eval(text, sample_config(training__micro_batch_size=101))


def eval_config(batch: int, eval_steps: int) -> Any:
    return sample_config(training__micro_batch_size=batch, training__eval_frequency=1, training__eval_steps=eval_steps)


SAMPLES = Samples(np.arange(4000, dtype=np.uint16), np.ones(4000, np.uint8), np.full(500, 8))


@pytest.mark.parametrize("data", [Text(np.arange(1007, dtype=np.uint16)), SAMPLES], ids=["text", "samples"])
def test_a_resumed_run_evaluates_only_on_rows_that_were_held_out(data: Text | Samples) -> None:
    """Training rows do not depend on the global batch, and evaluation rows only in how many are read."""
    first = eval_config(4, eval_steps=4)
    training, evaluation = split_train_eval(data, first)
    earlier = HeldOut(16, data_fingerprint(training, first), first.model_dump())
    for batch, eval_steps in ((4, 4), (8, 1), (3, 5)):
        config = eval_config(batch, eval_steps)
        held_out = rows_to_hold_out(data, config, earlier)
        assert held_out == 16
        rows = split_train_eval(data, config, held_out)
        assert data_fingerprint(rows[0], config) == earlier.fingerprint
        assert len(rows[1]) == batch * eval_steps
        for i in range(len(rows[1])):
            assert rows[1][i].input_ids.tolist() == evaluation[i].input_ids.tolist()
    with pytest.raises(UserError, match=r"only 16 .* use eval_steps of at most 2"):
        rows_to_hold_out(data, eval_config(8, eval_steps=4), earlier)
    without = sample_config(training__micro_batch_size=4)
    all_rows, _ = split_train_eval(data, without)
    with pytest.raises(UserError, match=r"held out only 0 from its start, .*; set eval_frequency to 0"):
        rows_to_hold_out(data, first, HeldOut(0, data_fingerprint(all_rows, without), without.model_dump()))
    for change in ({"training__seed": 7}, {"dataset__shuffle": False}):  # another order of the same rows
        with pytest.raises(UserError, match=r"reads 18 sequences .* only 16"):
            rows_to_hold_out(data, sample_config(training__eval_frequency=1, training__eval_steps=9, **change), earlier)
    other = data._replace(tokens=data.tokens + 1)
    assert rows_to_hold_out(other, eval_config(8, eval_steps=4), earlier) == 32  # other data, so nothing is known
    assert rows_to_hold_out(data, first, None) == 16


def test_rows_that_cannot_be_told_apart_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first = eval_config(4, eval_steps=4)
    training, _ = split_train_eval(SAMPLES, first)
    earlier = HeldOut(16, data_fingerprint(training, first), first.model_dump())
    longer = {"training__seq_length": 20}
    mixture = {"dataset__mixture": {"other.txt": 1.0}, "training__seed": 7}
    for changes, words in ((longer, "another seq_length"), (mixture, "another seed of a mixture")):
        for evaluates in (0, 1):
            caplog.clear()
            config = sample_config(**changes, training__eval_frequency=evaluates, training__eval_steps=3)
            assert rows_to_hold_out(SAMPLES, config, earlier) == 6 * evaluates
            assert (f"with {words}, evaluations may read what" in caplog.text) == (evaluates == 1)


def test_a_resume_with_another_length_evaluates_only_on_tokens_that_were_held_out() -> None:
    """160 tokens: 16 rows of 10, or 17 of 9."""
    data, first = Text(np.arange(1007, dtype=np.uint16)), eval_config(4, eval_steps=4)
    training, _ = split_train_eval(data, first)
    earlier = HeldOut(16, data_fingerprint(training, first), first.model_dump())
    keys = {"training__seq_length": 9, "training__eval_frequency": 1}
    assert rows_to_hold_out(data, sample_config(**keys, training__eval_steps=8), earlier) == 17
    with pytest.raises(UserError, match=r"reads 18 sequences .* only 17 from its start"):
        rows_to_hold_out(data, sample_config(**keys, training__eval_steps=9), earlier)


# -------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_of_text_stays_that_of_older_checkpoints_and_does_not_depend_on_masks() -> None:
    for end in (None, 3):
        rows = TextRows(random_tokens(), 16, end)
        assert data_fingerprint(rows, make_config()) == "e6b563a1100b6d2fe7dc17b8"
        assert data_fingerprint(rows, make_config(dataset__shuffle=False)) == "c02341bff22a0e73acadf780"


def test_the_fingerprint_of_samples_changes_with_the_rows() -> None:
    def fingerprint(samples: Samples, **changes: Any) -> str:
        config = sample_config(dataset__prompt_column="p", dataset__completion_column="c", **changes)
        return data_fingerprint(split_train_eval(samples, config)[0], config)

    samples = SAMPLES._replace(lengths=np.tile([4, 12], 250))  # some are longer than a row
    before = fingerprint(samples)
    assert before == fingerprint(samples, distributed__dp_size=2, dataset__mask_documents=False)
    counted = samples.counted.copy()
    counted[:4] = 0
    changed = [
        fingerprint(samples, training__seq_length=16),
        fingerprint(samples, dataset__long_samples="drop"),
        fingerprint(samples._replace(lengths=np.tile([5, 11], 250))),
        fingerprint(samples._replace(tokens=samples.tokens + 1)),
        fingerprint(samples._replace(counted=counted)),
    ]
    assert len({before, *changed}) == 1 + len(changed)
