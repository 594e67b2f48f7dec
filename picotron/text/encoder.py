"""Encoders: items that the records of a data set are converted to -> parts of arrays."""

from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from picotron.text.document_files import Convert, Piece

# Options of all calls of a tokenizer.
NO_SPECIAL_TOKENS = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}


class Encoder(Protocol):
    """Encoder of items that the records of a data set are converted to.

    Attributes:
        dtypes: dtype of each array.
        convert: function that makes items of a record.
    """

    dtypes: dict[str, type]

    @property
    def convert(self) -> Convert | None: ...

    def size(self, item: Any) -> int:
        """Return the approximate number of characters of an item."""
        ...

    def encode(self, items: list[Any]) -> dict[str, np.ndarray]:
        """Turn items into parts of the arrays."""
        ...


class TextEncoder:
    """Encoder of text into tokens. The end-of-sequence token follows each document, if the tokenizer has one."""

    convert = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dtype: type) -> None:
        self.tokenizer, self.dtypes = tokenizer, {"tokens": dtype}
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def size(self, piece: Piece) -> int:
        return len(piece.text)

    def encode(self, pieces: list[Piece]) -> dict[str, np.ndarray]:
        ids = self.tokenizer([piece.text for piece in pieces], **NO_SPECIAL_TOKENS)["input_ids"]
        dtype = self.dtypes["tokens"]
        tokens: list[np.ndarray] = [
            np.array(those + self.end if piece.ends_document else those, dtype)
            for piece, those in zip(pieces, ids, strict=True)
        ]
        return {"tokens": np.concatenate(tokens)}
