"""Tokens with the characters that they stand for."""

import bisect
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import processors
from transformers import PreTrainedTokenizerBase


class Spans(NamedTuple):
    """Tokens of a text, in its order. Two tokens can share characters, such as the bytes of an emoji.

    Args:
        ids: the tokens.
        span: function that returns the range of characters of token i.
    """

    ids: list[int]
    span: Callable[[int], tuple[int, int]]

    def begun(self, place: int) -> int:
        """Count the tokens that begin before a place in the text."""
        return bisect.bisect_left(range(len(self.ids)), place, key=lambda i: self.span(i)[0])

    def ended(self, place: int) -> int:
        """Count the tokens that end at a place in the text, or before it."""
        return bisect.bisect_right(range(len(self.ids)), place, key=lambda i: self.span(i)[1])

    def divide(self, place: int) -> bool:
        """Return whether no token has characters on both sides of a place."""
        return self.begun(place) <= self.ended(place)

    def next_division(self, place: int) -> int:
        """Return the first place, from the given one on, where a token begins and no token before it continues. Returns
        a place after all tokens, or the given one, if there is none.
        """
        while not self.divide(place):
            place = self.span(self.begun(place) - 1)[1]
        following = self.begun(place)  # may begin later, after characters that have no token, such as a lone accent
        return self.span(following)[0] if following < len(self.ids) else place


class SpanTokenizer:
    """Tokenizer of texts, without special tokens in front of them or after them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.is_fast = tokenizer.is_fast
        if self.is_fast:
            tokenizer = copy.deepcopy(tokenizer)
            # A post-processor adds special tokens, and some take the white space at its ends off a token's characters.
            tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
        self.tokenizer = tokenizer

    def __call__(self, texts: list[str], places: list[list[int]]) -> list[Spans]:
        """Tokenise texts.

        Args:
            places: places in each text, in ascending order. Tokenizers that do not know the characters of their tokens
                (in transformers: slow tokenizers) only find out which of these places lie between two tokens.
        """
        if not self.is_fast:
            return [self._divided(text, here) for text, here in zip(texts, places, strict=True)]
        if not texts:  # which transformers cannot tokenise
            return []
        encoded = self._encode(texts)
        return [
            Spans(ids, encoding.token_to_chars)
            for ids, encoding in zip(encoded["input_ids"], encoded.encodings, strict=True)
        ]

    def _encode(self, texts: list[str]) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)

    def _divided(self, text: str, places: list[int]) -> Spans:
        """Tokenise a text, and its beginnings up to some places: if these have the first of its tokens, the place lies
        between two tokens.
        """
        ids, *beginnings = self._encode([text, *(text[:place] for place in places)])["input_ids"]
        spans: list[tuple[int, int]] = []
        start = 0
        for place, beginning in zip([*places, len(text)], [*beginnings, ids], strict=True):
            if ids[: len(beginning)] == beginning:
                spans += [(start, place)] * (len(beginning) - len(spans))
                start = place
        return Spans(ids, spans.__getitem__)
