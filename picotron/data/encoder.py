"""Encoders: items that the records of a data set are converted to -> parts of arrays."""

from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from picotron.data.document_files import Convert, Piece
from picotron.data.spans import SpanTokenizer


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
    """Encoder of text into tokens. The end-of-sequence token follows each document, if the tokenizer has one.

    The pieces of a long document are tokenised with a part of the text around them, and each cut moves to the next
    place between two tokens, so that the tokens are those of the whole document, unless they depend on more than
    CONTEXT characters on either side: for example, in a word that is longer.
    """

    convert = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dtype: type) -> None:
        self.tokenizer, self.dtypes = SpanTokenizer(tokenizer), {"tokens": dtype}
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def size(self, piece: Piece) -> int:
        return len(piece.text)

    def encode(self, pieces: list[Piece]) -> dict[str, np.ndarray]:
        moves = self._moves({cut for piece in pieces for cut in piece.cuts})
        starts = [len(piece.before) + moves[piece.cuts[0]] for piece in pieces]
        texts = [piece.before + piece.text + piece.after[: moves[piece.cuts[1]]] for piece in pieces]
        dtype = self.dtypes["tokens"]
        tokens: list[np.ndarray] = []
        spans = self.tokenizer(texts, [[start] for start in starts])
        for piece, start, text, each in zip(pieces, starts, texts, spans, strict=True):
            if not each.divide(start):  # although `_moves` has found that no token crosses this place
                start, each = 0, self.tokenizer([text[start:]], [[]])[0]
            ids = each.ids[each.begun(start) :]
            tokens.append(np.array(ids + self.end if piece.ends_document else ids, dtype))
        return {"tokens": np.concatenate(tokens)}

    def _moves(self, cuts: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Return by how many characters to move cuts between two texts, so that no token has characters of both sides.
        Both pieces at a cut find the same number, because it depends on nothing but the text around the cut.
        """
        moves = dict.fromkeys(cuts, 0)
        within = [cut for cut in cuts if all(cut)]  # the others are at the ends of a document
        places = [len(before) for before, _ in within]
        spans = self.tokenizer([before + after for before, after in within], [[place] for place in places])
        for cut, place, each in zip(within, places, spans, strict=True):
            moves[cut] = each.next_division(place) - place
        return moves
