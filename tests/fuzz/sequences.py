"""Rows that a data set should become, from what the tokenizer gives for whole texts."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from picotron.config import Config
from picotron.data import split_train_eval
from picotron.model_config import load_model_config
from picotron.rows import Rows, Samples
from picotron.text.tokens import read_arrays, write_tokens
from tests.fuzz.cases import Case
from tests.fuzz.files import records_of, tokenizer_of


class Document(NamedTuple):
    """A sequence that attends to itself only, with the weight of each target."""

    input_ids: list[int]
    target_ids: list[int]
    weights: list[float]


class CaseRows(NamedTuple):
    """Rows for training and for evaluation, each a list of documents."""

    training: list[list[Document]]
    evaluation: list[list[Document]]


class Mismatch(AssertionError):
    """Data that differ from what the tokenizer gives."""


def rows_of_case(case: Case, folder: Path, config: Config) -> CaseRows:
    """Return the rows of a data set, each a list of documents, see `Document`.

    Raises:
        Mismatch: the tokens or the mask of a sample are not those of its whole text.
    """
    if case["data"]["kind"] == "text":
        return rows_of_text(case, config)
    model_config = load_model_config(config.model)
    data = read_arrays(config, write_tokens(config, model_config))
    assert isinstance(data, Samples)
    compare_samples(case, data)
    # Which samples share a row is up to the packing; what they contain, has been compared.
    return CaseRows(*map(rows_of_samples, split_train_eval(data, config)))


def document(input_ids: Any, target_ids: Any, weights: Any = None) -> Document:
    weights = np.ones(len(input_ids)) if weights is None else weights
    return Document(*(list(map(int, ids)) for ids in (input_ids, target_ids)), [float(weight) for weight in weights])


def rows_of_text(case: Case, config: Config) -> CaseRows:
    """Cut the tokens of all documents, each with an end token, into rows, and the rows into documents."""
    tokenizer, T = tokenizer_of(case), config.training.seq_length
    texts = [record["text"] for record in records_of(case)]
    stream = [
        token
        for text in texts
        if text
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]
    start = max(0, len(stream) - 1 - config.held_out_sequences * T)
    parts = []
    for tokens in (stream[: start + 1], stream[start:]):
        rows = []
        for first in range(0, (len(tokens) - 1) // T * T, T):
            inputs, targets = tokens[first : first + T], tokens[first + 1 : first + T + 1]
            masks = config.dataset.masks_documents
            ends = [i + 1 for i, token in enumerate(inputs) if masks and token == tokenizer.eos_token_id and i + 1 < T]
            rows.append([document(inputs[a:b], targets[a:b]) for a, b in pairwise([0, *ends, T])])
        parts.append(rows)
    return CaseRows(*parts)


def rows_of_samples(rows: Rows) -> list[list[Document]]:
    result = []
    for i in range(len(rows)):
        row = rows[i]
        assert row.counted is not None
        ends = [0, len(row.input_ids)] if row.documents is None else [0, *row.documents.cumsum().tolist()]
        result.append([
            document(row.input_ids[a:b], row.target_ids[a:b], row.counted[a:b]) for a, b in pairwise(ends)
        ])  # fmt: skip
    return result


def compare_samples(case: Case, data: Samples) -> None:
    """Compare the tokens and the mask of each sample with those of its whole text."""
    ends = data.lengths.cumsum()
    expected = [whole_sample(case, record) for record in records_of(case)]
    if len(expected) != len(ends):
        raise Mismatch(f"{len(ends)} samples of {len(expected)} records")
    for i, (end, size) in enumerate(zip(ends, data.lengths, strict=True)):
        found = data.tokens[end - size : end].tolist(), data.counted[end - size : end].tolist()
        for what, ours, theirs in zip(("tokens", "mask"), found, expected[i], strict=True):
            if ours != theirs:
                raise Mismatch(f"the {what} of sample {i} are {ours}, but those of the whole text {theirs}")


def whole_sample(case: Case, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens of a record's whole text, and which of them the loss counts."""
    raise NotImplementedError
