"""Micro-batches: the order of samples does not depend on the layout, and a resume trains on the same rows."""

from typing import Any

import numpy as np
import pytest
import torch

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import MicroBatchDataLoader, TextRows, epoch_order
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import make_config, random_tokens
from workbench.run.rows import data_fingerprint
from workbench.run.token_files import Samples, Text
from workbench.variants.choose import split_train_eval
from workbench.variants.whole import MaskedRows, WholeText

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


def test_ranks_read_the_rows_of_a_global_batch_in_order(pool: WorkerPool) -> None:
    """Sample s * 12 + (i * 2 + rank) * 3 + b is row b of micro-batch i of a rank; 30 steps cross 3 epochs."""
    order = [10 * int(w) for epoch in range(4) for w in epoch_order(100, 42, epoch)]
    config = sample_config(
        distributed__dp_size=2,
        training__micro_batch_size=3,
        training__gradient_accumulation_steps=2,
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
    with pytest.raises(UserError, match=r"1,001 tokens in python-stdlib: enough for 100 .* one global batch needs 101"):
        split_train_eval(text, sample_config(training__micro_batch_size=101))


KEYS: dict[str, Any] = {"training__micro_batch_size": 4, "training__eval_frequency": 1, "training__eval_steps": 4}
SAMPLES = Samples(np.arange(4000, dtype=np.uint16), np.ones(4000, np.uint8), np.full(500, 8))


@pytest.mark.parametrize("data", [Text(np.arange(1007, dtype=np.uint16)), SAMPLES], ids=["text", "samples"])
def test_evaluation_reads_rows_of_all_data_that_are_not_trained_on(data: Text | Samples) -> None:
    training, evaluation = split_train_eval(data, sample_config(**KEYS))
    assert len(evaluation) == 16
    targets = [
        {int(token) for i in range(len(rows)) for token in rows[i].target_ids} for rows in (training, evaluation)
    ]
    assert targets[0] & targets[1] <= {0}  # padding
    whole, _ = split_train_eval(data, sample_config(training__micro_batch_size=4))
    assert {int(token) for i in range(len(whole)) for token in whole[i].target_ids} == targets[0] | targets[1]
    starts = np.array([evaluation[i].input_ids[0] for i in range(16)]) / len(data.tokens)
    assert ((starts > 0.5).sum(), (starts > 0.25).sum()) in [(n, m) for n in range(4, 13) for m in range(8, 16)]
    other = split_train_eval(data, sample_config(**KEYS | {"training__seed": 1}))[1]
    assert [other[i].input_ids[0] for i in range(16)] != [evaluation[i].input_ids[0] for i in range(16)]


@pytest.mark.parametrize("size", [0, 1, 2, 11, 40, 41, 42, 81, 999])
def test_the_rows_of_a_whole_text_have_every_target_once(size: int) -> None:
    tokens = np.arange(1, size + 1, dtype=np.uint16)
    rows = WholeText(tokens, 10, None, 4)
    assert len(rows) % 4 == 0
    found = [row.target_ids[row.counted == 1] for row in map(rows.__getitem__, range(len(rows)))]
    assert np.concatenate([np.empty(0), *found]).tolist() == tokens[1:].tolist()
    assert rows.counts.tolist() == [len(each) for each in found]


# -------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_of_text_stays_that_of_older_checkpoints_and_does_not_depend_on_masks() -> None:
    for end in (None, 3):
        rows = MaskedRows(random_tokens(), 16, end)
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
