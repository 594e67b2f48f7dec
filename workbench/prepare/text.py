"""Text -> pieces -> tokens. A document can be larger than memory, so it is tokenised piece by piece."""

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from picotron.console import UserError
from workbench.prepare.token_characters import SpanTokenizer

PIECE = 2**16  # characters
WINDOW = 2**14  # characters after a piece in which to look for a place to cut
CONTEXT = 2**8  # characters on each side of a cut that decide which tokens are next to it

Columns = dict[str, str]  # columns of the data, by the config keys that name them


class Piece(NamedTuple):
    """Text of a document, or a part of it if it is long.

    Args:
        ends_document: whether the document ends with it.
        before, after: up to CONTEXT characters of the document before and after the text.
    """

    text: str
    ends_document: bool
    before: str = ""
    after: str = ""

    @property
    def cuts(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The characters before and after the piece's beginning, and those before and after its end."""
        return (self.before, (self.text + self.after)[:CONTEXT]), ((self.before + self.text)[-CONTEXT:], self.after)


def cut(document: TextIO) -> Iterator[Piece]:
    """Cut a document into pieces: before white space, where the tokens on one side hardly depend on the text on the
    other side.
    """
    before, text = "", document.read(PIECE + WINDOW + CONTEXT)
    while len(text) > PIECE + WINDOW:
        space = re.compile(r"\S(?=\s)").search(text, PIECE, PIECE + WINDOW)
        end = space.end() if space else PIECE
        yield Piece(text[:end], False, before, text[end : end + CONTEXT])
        before, text = (before + text[:end])[-CONTEXT:], text[end:]
        text += document.read(PIECE + WINDOW + CONTEXT - len(text))
    yield Piece(text, True, before)


def text_of(record: Any, key: str, column: str) -> str | None:
    """Return the text of a record in the column that a config key names, or None if it is null.

    Raises:
        UserError: the record has no valid text in this column.
    """
    if not isinstance(record, dict):
        raise UserError(f"expected an object {{...}}, but found a {type(record).__name__}")
    text = record.get(column, 0)
    if text is not None and not isinstance(text, str):
        columns = [name for name, value in record.items() if isinstance(value, str)]
        found = f", but the {type(text).__name__} {str(text)[:20]}" if column in record else ""
        raise UserError(f"dataset.{key}={column!r} has no text there{found}; {use_one_of(columns)}")
    return None if text is None else check_characters(text)


class Start(NamedTuple):
    """The beginning-of-sequence token, if the tokenizer begins texts with it.

    Args:
        tokens: the token, or none.
        text: its text.
    """

    tokens: Sequence[int] = ()
    text: str = ""

    def before(self, text: str) -> Sequence[int]:
        """Return the tokens before a text: none if it begins with the token already."""
        return () if self.text and text.startswith(self.text) else self.tokens


def start_of(tokenizer: PreTrainedTokenizerBase) -> Start:
    """Return what a tokenizer begins texts with."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return Start([tokenizer.bos_token_id], tokenizer.bos_token) if begins else Start()


def use_one_of(columns: list[str]) -> str:
    """Return the remedy for a column that has no text, or does not exist."""
    return f"use one of {columns}" if columns else "no other column has text, either"


def check_characters(text: str) -> str:
    """Return a text, or raise a UserError if it has surrogates, which cannot be encoded."""
    if re.search("[\ud800-\udfff]", text):
        raise UserError("the text has an unpaired surrogate (\\ud800 to \\udfff), which is not a character; remove it")
    return text


def pieces_of(record: Any, columns: Columns) -> Iterator[Piece]:
    """Yield the pieces of a record's texts. The piece of a text file is itself a record."""
    if isinstance(record, Piece):
        yield record
        return
    for text in [text_of(record, key, column) for key, column in columns.items()]:
        yield from cut(io.StringIO(text or "", newline=""))


class TextEncoder:
    """Encoder of text into tokens. Each document begins as the tokenizer begins a text, and the end-of-sequence token
    follows it, if the tokenizer has one.

    The pieces of a long document are tokenised with a part of the text around them, and each cut moves to the next
    place between two tokens, so that the tokens are those of the whole document, unless they depend on more than
    CONTEXT characters on either side: for example, in a word that is longer.

    Args:
        columns: columns with texts, by their keys.
        tokenizer: the tokenizer.
        dtype: dtype of the tokens.
        starts: whether documents begin with the beginning-of-sequence token, if the tokenizer adds one to texts.
    """

    def __init__(self, columns: Columns, tokenizer: PreTrainedTokenizerBase, dtype: type, starts: bool) -> None:
        self.columns, self.tokenizer, self.dtypes = columns, SpanTokenizer(tokenizer), {"tokens": dtype}
        self.notes: Counter[str] = Counter()  # see `SampleEncoder`
        self.start = start_of(tokenizer) if starts else Start()
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def convert(self, record: Any) -> Iterator[Piece]:
        """Yield the items of a record, which are encoded together with those of other records."""
        return pieces_of(record, self.columns)

    def size(self, piece: Piece) -> int:
        """Return the approximate number of characters of an item. Items without any are left out."""
        return len(piece.text)

    def encode(self, pieces: list[Piece]) -> dict[str, np.ndarray]:
        """Turn items into parts of the arrays, whose dtypes are `dtypes`."""
        moves = self._moves({cut for piece in pieces for cut in piece.cuts})
        starts = [len(piece.before) + moves[piece.cuts[0]] for piece in pieces]
        texts = [piece.before + piece.text + piece.after[: moves[piece.cuts[1]]] for piece in pieces]
        dtype = self.dtypes["tokens"]
        tokens: list[np.ndarray] = []
        spans = self.tokenizer(texts, [[start] for start in starts])
        for piece, start, text, each in zip(pieces, starts, texts, spans, strict=True):
            if not each.divide(start):  # although `_moves` has found that no token crosses this place
                start, each = 0, self.tokenizer([text[start:]], [[]])[0]
            begin = () if piece.before else self.start.before(piece.text)
            end = self.end if piece.ends_document else ()
            tokens.append(np.array([*begin, *each.ids[each.begun(start) :], *end], dtype))
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
