"""The rows of a run: those to train on, those to evaluate, and their fingerprint."""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from picotron.config import Config, Dataset
from picotron.console import UserError
from picotron.data.loader import Row, Rows, TextRows, epoch_order
from workbench.run.token_files import Samples, Text

logger = logging.getLogger("picotron")

HELD_OUT = 2**40  # in the place of an epoch's number
DECODED = 2**20  # tokens that are decoded at a time
CONTEXT = 16  # tokens before a row, more than the bytes of a character


class SomeRows(Rows):
    """Some rows of a data set.

    Args:
        rows: rows of the data set.
        numbers: which of them.
    """

    def __init__(self, rows: Rows, numbers: np.ndarray) -> None:
        self.rows, self.numbers = rows, numbers
        self.counts = None if rows.counts is None else rows.counts[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Row:
        return self.rows[int(self.numbers[i])]

    def identity(self) -> tuple[Any, np.ndarray]:
        size, ends = self.rows.identity()
        return (size, hashlib.sha256(self.numbers.tobytes()).hexdigest()), ends


def data_fingerprint(rows: Rows, config: Config) -> str:
    """Return a hash of the size of the data, their first and last 1,000 tokens, and their order. Runs with different
    hashes read different rows; runs with equal hashes, almost certainly the same.
    """
    training, (size, ends) = config.training, rows.identity()
    rules = (size, training.seq_length, training.seed if config.dataset.shuffle else "in order")
    return hashlib.sha256(repr(rules).encode() + ends.astype(np.int64).tobytes()).hexdigest()[:24]


def held_out_sequences(config: Config) -> int:
    """Return the number of sequences of the training data that are evaluated, and not trained on."""
    evaluates = config.training.eval_frequency and config.dataset.eval_name is None
    return config.training.eval_steps * config.global_batch_size if evaluates else 0


def hold_out(rows: Rows, summary: str, config: Config, unit: int) -> tuple[Rows, Rows]:
    """Return the rows for training and those for evaluations, `held_out_sequences` of them, drawn with the seed.

    Args:
        summary: text about the data, for the log and for errors.
        unit: number of the summary's tokens or samples in a row.

    Raises:
        UserError: there are fewer rows than evaluation and one global batch need.
    """
    batch, held_out = config.global_batch_size, held_out_sequences(config)
    if len(rows) < batch + held_out:
        also, fewer = (f" and evaluation {held_out}", ", fewer eval_steps") if held_out else ("", "")
        cut = ", long_samples='cut'" * (config.dataset.long_samples == "drop")
        raise UserError(
            f"{summary}: enough for {len(rows)} sequences of {config.training.seq_length} tokens, but one global batch needs "
            f"{batch}{also}; use more data{fewer}{cut}, another seq_length or a smaller batch"
        )
    logger.info("%s, %s of them for evaluation", summary, f"{held_out * unit:,}")
    order = epoch_order(len(rows), config.training.seed, HELD_OUT)
    held, trained = np.sort(order[:held_out]), np.sort(order[held_out:])
    return (SomeRows(rows, trained), SomeRows(rows, held)) if held_out else (rows, SomeRows(rows, held))


def split_train_eval(data: Text | Samples, config: Config, evaluation: object = None) -> tuple[Rows, Rows]:
    """Return the rows of a text for training and for evaluations, see `hold_out`."""
    assert isinstance(data, Text), "variants.choose has others"
    assert evaluation is None
    length = config.training.seq_length
    return hold_out(TextRows(data.tokens, length), summary_of(data, config), config, length)


def summary_of(text: Text, config: Config) -> str:
    return f"{len(text.tokens):,} tokens in {title_of(config.dataset)}"


def title_of(section: Dataset) -> str:
    """Return the names of the data sets."""
    return " and ".join(section.weights)


def targets_and_bytes(rows: Rows, tokenizer_folder: Path) -> tuple[int, int]:
    """Count the targets that the loss counts, and the bytes of their text in UTF-8. Special tokens, such as the
    end-of-sequence token, are targets without text.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    vocabulary = tokenizer.get_vocab()
    single = [number for token, number in vocabulary.items() if re.fullmatch("<0x[0-9A-F]{2}>", token)]

    def size_of(ids: np.ndarray) -> int:
        # The decoder of tokens such as <0xE3> spoils all bytes beside a missing one, but none that are letters.
        ids = np.where(np.isin(ids, single), vocabulary.get("<0x61>", 0), ids)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return len(text.rstrip("\ufffd").encode())

    def size_after(before: np.ndarray, ids: np.ndarray) -> int:
        # A character, such as an emoji, that the bounds of rows cut counts where its last byte is.
        return size_of(np.concatenate([before, ids])) - size_of(before)

    targets = size = 0
    if isinstance(rows, SomeRows) and isinstance(rows.rows, TextRows):
        for number in rows.numbers.tolist():
            first = number * rows.rows.seq_length + 1
            size += size_after(rows.rows.tokens[max(0, first - CONTEXT) : first], rows.rows[number].target_ids)
        return len(rows) * rows.rows.seq_length, size
    count, before = max(1, DECODED // len(rows[0].target_ids)), rows[0].input_ids[: isinstance(rows, TextRows)]
    for first in range(0, len(rows), count):
        batch = [rows[i] for i in range(first, min(first + count, len(rows)))]
        parts = [row.target_ids if row.counted is None else row.target_ids[row.counted > 0] for row in batch]
        ids = np.concatenate(parts)
        targets, size = targets + len(ids), size + size_after(before, ids)
        before = ids[-CONTEXT:]
    return targets, size
