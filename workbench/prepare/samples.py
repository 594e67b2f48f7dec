"""Samples for fine-tuning: records with a prompt and a completion, or with the messages of a conversation."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from picotron.console import UserError, first_line
from picotron.files import parse_json
from workbench.prepare.documents import TOOLS
from workbench.prepare.text import Columns, check_characters, text_of
from workbench.prepare.token_characters import Spans, SpanTokenizer


class Sample(NamedTuple):
    """Tokens of a sample.

    Args:
        begin: tokens before the text, which the loss does not count.
        text: text, which is tokenised as a whole.
        counted: ranges of characters, in ascending order. The loss counts a token that has any of them.
        end: tokens after the text, which the loss counts.
    """

    begin: list[int]
    text: str
    counted: list[tuple[int, int]]
    end: list[int]


class SampleEncoder:
    """Encoder of a data set for fine-tuning, see `Samples`.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, which follows completions, or no chat template.
    """

    def __init__(self, columns: Columns, tokenizer: PreTrainedTokenizerBase, dtype: type) -> None:
        self.tokenizer = SpanTokenizer(tokenizer)
        self.dtypes = {"tokens": dtype, "counted": np.uint8, "lengths": np.int64}
        self.convert: Callable[[Any], Iterator[Sample]] = (
            Conversations(columns["messages_column"], tokenizer)
            if "messages_column" in columns
            else PromptsAndCompletions(columns, tokenizer)
        )

    def size(self, sample: Sample) -> int:
        return len(sample.begin) + len(sample.text) + len(sample.end)

    def encode(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        tokens: list[int] = []
        masks: list[np.ndarray] = []
        places = [[*itertools.chain(*sample.counted)] for sample in samples]
        for sample, spans in zip(samples, self.tokenizer([each.text for each in samples], places), strict=True):
            mask = np.zeros(len(spans.ids), np.uint8)
            for start, end in sample.counted:
                self.check(sample.text, spans, (start, end))
                mask[spans.ended(start) : spans.begun(end)] = 1
            tokens += sample.begin + spans.ids + sample.end
            masks.append(np.pad(mask, (len(sample.begin), 0)))
            masks[-1] = np.pad(masks[-1], (0, len(sample.end)), constant_values=1)
        arrays = {"tokens": tokens, "counted": np.concatenate(masks), "lengths": [*map(len, masks)]}
        return {name: np.asarray(array, self.dtypes[name]) for name, array in arrays.items()}

    def check(self, text: str, spans: Spans, places: tuple[int, int]) -> None:
        """Raise a UserError if a tokenizer does not tell which tokens have the characters between two places."""
        for place in places:
            if not (self.tokenizer.is_fast or spans.divide(place)):
                raise UserError(
                    f"the tokenizer does not tell which characters its tokens stand for, so the loss cannot begin or end "
                    f"at {text[place : place + 20]!r} after {text[max(0, place - 20) : place]!r}; choose a "
                    f"model.tokenizer with a tokenizer.json"
                )


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
        text = prompt + completion
        yield Sample(begin, text, [(len(prompt), len(text))], self.end)

    def text(self, record: Any, key: str) -> str:
        text = text_of(record, key, self.columns[key])
        if text is None:
            raise UserError(f"dataset.{key}={self.columns[key]!r} is null there; remove the record")
        return text


@functools.cache
def is_marked(template: str) -> bool:
    """Return whether a chat template has {% generation %}, not counting comments and texts."""
    tokens = [(kind, text) for _, kind, text in jinja2.Environment().lex(template) if kind != "whitespace"]
    return any(
        kind == "block_begin" and after == ("name", "generation") for (kind, _), after in itertools.pairwise(tokens)
    )


def is_conversation(messages: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is a list of messages, each with a role, and with a text as content unless it is null."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | None)
        for message in messages
    )


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a record, which may also be a JSON text, or None."""
    tools = record.get(TOOLS)
    if isinstance(tools, str):
        tools = parse_json(tools, f"the text in column {TOOLS!r}")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"the column {TOOLS!r} should have a list of JSON schemas there, or nothing; rename the column if it has "
            f"another purpose"
        )
    _check_texts(tools)
    return tools


class Conversations:
    """Converter of records with a list of messages, and any tools, through the tokenizer's chat template.

    The loss counts what the template marks with {% generation %}. If the template has no such marks, the loss counts
    the text that it adds for a message of the assistant after the beginning of its turn, which `add_generation_prompt`
    renders.
    """

    def __init__(self, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.column, self.tokenizer = column, tokenizer
        try:
            tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"dataset.messages_column={column!r} needs a chat template, but the tokenizer has none; choose another "
                f"model.tokenizer"
            ) from None

    def __call__(self, record: Any) -> Iterator[Sample]:
        messages, tools = self.messages(record), tools_of(record)
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
            marks = is_marked(template)
            text, counted = self.marked(template, messages, tools) if marks else self.turns(messages, tools)
        except UserError:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise UserError(f"the chat template fails for these messages: {first_line(error)}") from None
        if not any(start < end for start, end in counted):
            does = "marks no text with {% generation %}" if marks else "adds no text for the assistant"
            raise UserError(
                f"the chat template {does} in this conversation, so the loss would count nothing; correct the template, or "
                f"remove the record"
            )
        yield Sample([], text, counted, [])

    def messages(self, record: Any) -> list[dict[str, Any]]:
        """Return the messages of a record up to the assistant's last one, after which the loss counts nothing."""
        messages = record.get(self.column) if isinstance(record, dict) else None
        if not is_conversation(messages):
            raise UserError(
                f"dataset.messages_column={self.column!r} should have a list of messages there, each an object with the "
                f"texts 'role' and 'content'"
            )
        _check_texts(messages)
        by_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not by_assistant:
            raise UserError("no message has the role 'assistant'; remove the record")
        return messages[: by_assistant[-1] + 1]

    def marked(self, template: str, messages: Any, tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation. Returns the text, and the ranges of characters that the template marks."""
        messages = [{key: value for key, value in each.items() if value is not None} for each in messages]
        texts, marks = render_jinja_template(
            [messages],
            tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], marks[0]

    def turns(self, messages: Any, tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation. Returns the text, and the range of characters of each of the assistant's turns."""
        text, counted = "", []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if i == 0:
                raise UserError(
                    "message 1 is the assistant's, and the chat template does not show where that turn begins; mark the turns "
                    "in the template with {% generation %}, or remove the record"
                )
            before = self.render(messages[:i], tools, add_generation_prompt=True)
            after = self.render(messages[: i + 1], tools)
            if not (before.startswith(text) and after.startswith(before)):
                raise UserError(
                    f"the chat template changes the text before message {i + 1} when it adds that message, so the "
                    f"assistant's turns cannot be told apart; mark them in the template with {{% generation %}}"
                )
            counted.append((len(before), len(after)))
            text = after
        return text, counted

    def render(self, messages: Any, tools: Any, **options: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tools, tokenize=False, **options)
        return text


def _check_texts(value: Any) -> None:
    check_characters(json.dumps(value, ensure_ascii=False, default=str))
