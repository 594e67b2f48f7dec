"""Rows: epochs, training and evaluation, fingerprints; and their bytes, by which losses of tokenizers are compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import TextRows, epoch_order
from tests.fuzz.tokenizer_kinds import CORPUS, make_tokenizer
from tests.support.oracle import make_config, random_tokens, tiny_llama
from tests.support.samples import PROMPTS, config_of, encode, write_jsonl
from workbench.prepare.tokens import write_tokens
from workbench.run.rows import SomeRows, data_fingerprint, targets_and_bytes
from workbench.run.token_files import Samples, Text, map_token_files
from workbench.variants.choose import split_train_eval
from workbench.variants.whole import MaskedRows


def sample_config(**changes: Any) -> Config:
    return make_config(**{"training__seq_length": 10} | changes)


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


KEYS = {"training__micro_batch_size": 4, "training__eval_frequency": 1, "training__eval_steps": 4}
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
    assert before == fingerprint(samples, dp_size=2, dataset__mask_documents=False)
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


KINDS = ("prepend", "metaspace first", "byte-level", "byte-level trimmed", "ByT5")  # those that can restore any text
TEXTS = ["def f(x):\n    return x + 1\n", "naïve 日本語のテキスト。 🙂👍🏽", "", "It is 4.", "語", *CORPUS[:40]]


def write_tokenizer(folder: str, kind: str) -> PreTrainedTokenizerBase:
    """Save a tokenizer. Its tokens for single bytes are not special, as in models."""
    make_tokenizer(kind).save_pretrained(folder)
    if (path := Path(folder, "tokenizer.json")).exists():
        data = json.loads(path.read_text())
        data["added_tokens"] = [each for each in data["added_tokens"] if not each["content"].startswith("<0x")]
        path.write_text(json.dumps(data))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_samples_are_those_of_their_completions(folder: str, tmp_path: Path, kind: str) -> None:
    write_tokenizer(folder, kind)
    pairs = [{"q": f"Prompt: {i}", "a": text} for i, text in enumerate(TEXTS)]
    config = config_of(
        write_jsonl(tmp_path / "pairs.jsonl", pairs),
        folder,
        training__seq_length=1000,
        training__micro_batch_size=1,
        **PROMPTS,
    )
    samples = encode(config, 480)
    rows, _ = split_train_eval(samples, config)
    assert targets_and_bytes(rows, Path(folder)) == (
        samples.counted.sum(),
        sum(len(text.encode()) for text in TEXTS),
    )


@pytest.mark.parametrize("start", ["(", "\U0001f9ed"])  # decoders strip a space in front of the first target
@pytest.mark.parametrize("kind", ["metaspace first", "byte-level"])
def test_bytes_of_text_are_those_between_the_first_and_the_last_target(
    folder: str, tmp_path: Path, kind: str, start: str
) -> None:
    """The bounds of some rows are within a character."""
    tokenizer, seq_length = write_tokenizer(folder, kind), 7
    text = start + "".join(TEXTS)
    (tmp_path / "text.txt").write_text(text)
    config = config_of(str(tmp_path / "text.txt"), folder, training__seq_length=seq_length)
    model_config = tiny_llama(vocab_size=480)
    data, _ = map_token_files(write_tokens(config, model_config), config, model_config)
    rows = TextRows(data.tokens, seq_length)
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    first = (
        0 if tokenizer(text)["input_ids"][0] == tokenizer.bos_token_id else 1
    )  # if not, the first token is no target
    last = min(first - 1 + len(rows) * seq_length, len(spans) - 1)  # the end-of-sequence token after it has no text
    expected = text[spans[first][0] : spans[last][1]].encode()
    assert targets_and_bytes(rows, Path(folder)) == (len(rows) * seq_length, len(expected))
    # Those of every other row, and of the rest, have all characters but one that the last row cuts.
    halves = [SomeRows(rows, np.arange(first, len(rows), 2)) for first in (0, 1)]
    whole = tokenizer.decode(data.tokens[: len(rows) * seq_length + 1])
    cut = len(whole.encode()) - len(whole.rstrip("\ufffd").encode())
    assert sum(targets_and_bytes(each, Path(folder))[1] for each in halves) == len(expected) - cut
