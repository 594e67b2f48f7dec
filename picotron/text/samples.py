"""Samples for fine-tuning: records with a prompt and a completion, or with the messages of a conversation."""

import itertools
import json
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from picotron.errors import UserError, first_line
from picotron.text.document_files import Columns, Convert, check_characters, text_of
from picotron.text.encoder import NO_SPECIAL_TOKENS

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Segment(NamedTuple):
    """Part of a sample: text, which is tokenised separately, or tokens; and whether the loss counts its tokens."""

    content: str | list[int]
    counted: bool


Sample = list[Segment]


class SampleEncoder:
    """Encoder of a data set for fine-tuning, see `Samples`.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, which follows completions, or no chat template.
    """

    def __init__(self, columns: Columns, tokenizer: PreTrainedTokenizerBase, dtype: type) -> None:
        self.tokenizer = tokenizer
        self.dtypes = {"tokens": dtype, "counted": np.uint8, "lengths": np.int64}
        self.convert: Convert = (
            Conversations(columns["messages_column"], tokenizer)
            if "messages_column" in columns
            else PromptsAndCompletions(columns, tokenizer)
        )

    def size(self, sample: Sample) -> int:
        return sum(len(segment.content) for segment in sample)

    def encode(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        segments = list(itertools.chain(*samples))
        texts = [segment.content for segment in segments if isinstance(segment.content, str)]
        ids = iter(self.tokenizer(texts, **NO_SPECIAL_TOKENS)["input_ids"] if texts else [])
        tokens = [next(ids) if isinstance(segment.content, str) else segment.content for segment in segments]
        sizes = [len(each) for each in tokens]
        ends = np.append(0, np.cumsum(sizes))[np.cumsum([len(sample) for sample in samples])]
        arrays = {
            "tokens": [*itertools.chain(*tokens)],
            "counted": np.repeat([segment.counted for segment in segments], sizes),
            "lengths": np.diff(ends, prepend=0),
        }
        return {name: np.asarray(array, self.dtypes[name]) for name, array in arrays.items()}


class PromptsAndCompletions:
    """Converter of records with a prompt and a completion, which is followed by the end-of-sequence token.

    A prompt begins as in generate.py: with the beginning-of-sequence token if the tokenizer adds one. Otherwise, an
    empty prompt is the end-of-sequence token, so that there is an input for the first token of the completion.
    """

    def __init__(self, columns: Columns, tokenizer: PreTrainedTokenizerBase) -> None:
        self.columns = columns
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, which ends a completion; choose another model.tokenizer"
            )
        begin, self.end = tokenizer("a")["input_ids"][:1], [tokenizer.eos_token_id]
        self.begin = begin if begin == [tokenizer.bos_token_id] else []

    def __call__(self, record: Any) -> Iterator[Sample]:
        prompt, completion = (self.text(record, key) for key in ("prompt_column", "completion_column"))
        begin = self.begin if prompt or self.begin else self.end
        yield [Segment(begin, False), Segment(prompt, False), Segment(completion, True), Segment(self.end, True)]

    def text(self, record: Any, key: str) -> str:
        text = text_of(record, key, self.columns[key])
        if text is None:
            raise UserError(f"dataset.{key}={self.columns[key]!r} is null there; remove the record")
        return text


class Conversations:
    """Converter of records with a list of messages, through the tokenizer's chat template.

    The loss counts what the template marks with {% generation %}. If it marks nothing, the loss counts the text that
    the template adds for a message of the assistant after the beginning of its turn, which `add_generation_prompt`
    renders.
    """

    def __init__(self, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.column, self.tokenizer = column, tokenizer
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"dataset.messages_column={column!r} needs a chat template, but the tokenizer has none; choose another "
                f"model.tokenizer"
            ) from None
        self.is_marked = bool(GENERATION.search(template))

    def __call__(self, record: Any) -> Iterator[Sample]:
        messages = self.messages(record)
        if not self.is_marked:
            yield self.turns(messages)
            return
        encoded = self.apply(messages, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(encoded["assistant_masks"], encoded["input_ids"], strict=True)
        runs = itertools.groupby(pairs, key=operator.itemgetter(0))
        yield [Segment([token for _, token in run], bool(counted)) for counted, run in runs]

    def messages(self, record: Any) -> list[dict[str, Any]]:
        """Return the messages of a record up to the assistant's last one, after which the loss counts nothing."""
        messages = record.get(self.column) if isinstance(record, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | None)
            for message in messages
        ):
            raise UserError(
                f"dataset.messages_column={self.column!r} should have a list of messages there, each an object with the "
                f"texts 'role' and 'content'"
            )
        check_characters(json.dumps(messages, ensure_ascii=False, default=str))
        by_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not by_assistant:
            raise UserError("no message has the role 'assistant'; remove the record")
        return messages[: by_assistant[-1] + 1]

    def turns(self, messages: list[dict[str, Any]]) -> Sample:
        """Split the text of a conversation before and after each turn of the assistant."""
        sample, text = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.apply(messages[:i], tokenize=False, add_generation_prompt=True)
            after = self.apply(messages[: i + 1], tokenize=False)
            if not (before.startswith(text) and after.startswith(before)):
                raise UserError(
                    f"the chat template changes the text before message {i + 1} when it adds that message, so the "
                    f"assistant's turns cannot be told apart; mark them in the template with {{% generation %}}"
                )
            sample += [Segment(before[len(text) :], False), Segment(after[len(before) :], True)]
            text = after
        return sample

    def apply(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program, and may raise anything
            raise UserError(f"the chat template fails for these messages: {first_line(error)}") from None
