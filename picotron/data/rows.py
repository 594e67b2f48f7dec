"""Rows of training data: sequences of seq_length inputs with as many targets. (`samples` has those of samples.)"""

import abc
import hashlib
from typing import Any, NamedTuple

import numpy as np


class Text(NamedTuple):
    """A data set of text.

    Args:
        tokens: the documents as one stream of tokens.
        end: the token after each document, if documents are masked, else None.
    """

    tokens: np.ndarray
    end: int | None = None


class Samples(NamedTuple):
    """A data set for fine-tuning.

    Args:
        tokens: (N,) the tokens of all samples, one sample after the other.
        counted: (N,) whether the loss counts the prediction of a token, 0 or 1.
        lengths: (S,) number of tokens of each sample.
    """

    tokens: np.ndarray
    counted: np.ndarray
    lengths: np.ndarray


class Row(NamedTuple):
    """T inputs and their targets.

    Args:
        input_ids, target_ids: (T,) tokens.
        counted: (T,) whether the loss counts a target, 0 or 1; None: it counts all.
        documents: lengths of the documents in the row, T in total, if documents are masked, else None.
    """

    input_ids: np.ndarray
    target_ids: np.ndarray
    counted: np.ndarray | None
    documents: np.ndarray | None


class Rows(abc.ABC):
    """The rows of a data set.

    Attributes:
        counts: number of targets that the loss counts in each row; None: it counts all.
    """

    counts: np.ndarray | None = None

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, i: int) -> Row: ...

    @abc.abstractmethod
    def identity(self) -> tuple[Any, np.ndarray]:
        """Return a value that changes with the size of the data, and the tokens at both ends."""


class TextRows(Rows):
    """The rows of a text. Row i starts at token i * seq_length, and its last target is the first input of row i + 1.

    Args:
        tokens: a stream of tokens.
        end: token after which a new document begins; None: documents are not masked.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int, end: int | None = None) -> None:
        self.tokens, self.seq_length, self.end = tokens, seq_length, end

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, i: int) -> Row:
        tokens = self.tokens[i * self.seq_length : (i + 1) * self.seq_length + 1]
        return Row(tokens[:-1], tokens[1:], None, self.documents(tokens))

    def documents(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return the lengths of the documents in a row, if documents are masked, else None."""
        if self.end is None:
            return None
        ends = np.flatnonzero(tokens[:-2] == self.end) + 1
        return np.diff(ends, prepend=0, append=self.seq_length)

    def identity(self) -> tuple[Any, np.ndarray]:
        return len(self.tokens), np.concatenate((self.tokens[:1000], self.tokens[-1000:]))


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
