"""Conversations -> texts, through the tokenizer's chat template, with the ranges of characters that the loss counts."""

import datetime
import functools
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from picotron.console import UserError, first_line
from workbench.files import parse_json
from workbench.prepare.documents import TOOLS, WEIGHT
from workbench.prepare.text import check_characters

logger = logging.getLogger("picotron")

Message = dict[str, Any]
Ranges = list[tuple[int, int]]

WEIGHTS = (WEIGHT, "train")  # keys of a message that say whether the loss counts it: 0 or 1, false or true
ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT, by which "from" names roles
# Some templates print today's date. The same data should have the same tokens on all days and machines, so they get
# this one, which is also Llama 3's default.
DATE = datetime.datetime(2024, 7, 26)
QUESTION, ANSWER = "QUESTION", "ANSWER"


class Sample(NamedTuple):
    """A text, tokenised as a whole, and the tokens around it.

    Args:
        text: the text.
        counted: ranges of characters, in ascending order. The loss counts a token that has any of them.
        begin: tokens before the text, which the loss does not count.
        end: tokens after the text, which the loss counts.
    """

    text: str
    counted: Ranges
    begin: Sequence[int] = ()
    end: Sequence[int] = ()

    def __str__(self) -> str:
        """Format the text, with the counted ranges in [[ ]]."""
        places = [0, *itertools.chain(*self.counted), len(self.text)]
        parts = [self.text[first:last] for first, last in itertools.pairwise(places)]
        return "".join(f"[[{part}]]" if i % 2 else part for i, part in enumerate(parts))


@functools.cache
def is_marked(template: str) -> bool:
    """Return whether a chat template has {% generation %}, not counting comments and texts."""
    tokens = [(kind, text) for _, kind, text in jinja2.Environment().lex(template) if kind != "whitespace"]
    return any(
        kind == "block_begin" and after == ("name", "generation") for (kind, _), after in itertools.pairwise(tokens)
    )


@functools.cache
def without_clock(template: str) -> str:
    """Return a chat template that prints DATE instead of today's date."""
    fixed = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(DATE.strftime(call[2])), template)
    if re.search(r"strftime_now\s*\(", fixed):
        raise UserError(
            "the chat template prints the date in a format that it computes, so the data would have other tokens each day; "
            "write the format into the template as a text"
        )
    return fixed


def is_conversation(messages: Any) -> TypeGuard[list[Message]]:
    """Return whether a value is a list of messages, each with a role, and with a text as content unless it is null."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | None)
        for message in messages
    )


def messages_of(value: Any) -> list[Message] | None:
    """Return the messages of a value, or None if it has none: a list of messages, each with "role" and "content", or
    with "from" and "value" as in ShareGPT; or such a list as JSON text.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, "the text with messages")
    if isinstance(value, list) and all(isinstance(each, dict) and {"from", "value"} <= each.keys() for each in value):
        value = [
            {"role": ROLES.get(each["from"], each["from"]), "content": each["value"]}
            | {key: each[key] for key in each if key not in ("from", "value")}
            for each in value
        ]
    if not is_conversation(value):
        return None
    check_texts(value)
    return value


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
    check_texts(tools)
    return tools


def is_counted(values: dict[str, Any]) -> bool:
    """Return whether the loss counts a message, or a record, by its keys of WEIGHTS."""
    for key in WEIGHTS:
        if (value := values.get(key)) not in (None, 0, 1):
            raise UserError(f"{key}={value!r} should be 0 or 1; the loss counts a text as a whole, or not at all")
    return all(values.get(key) in (None, 1) for key in WEIGHTS)


class ChatTemplate:
    """The chat template of a tokenizer.

    The loss counts what the template marks with {% generation %}. If the template has no such marks, the loss counts
    the text that it adds for a message of the assistant after the beginning of its turn, which `add_generation_prompt`
    renders.

    Args:
        needed_by: what needs a chat template, for an error.
        ignored: gets the number of conversations in which the template ignores a key of messages, or the tools, by
            name.
        only_last: whether the loss counts the assistant's last turn only.

    Attributes:
        end: tokens after a conversation, which the loss counts: the end-of-sequence token if the template shows no
            other end of the assistant's last turn.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, needed_by: str, ignored: Counter[str], only_last: bool = False
    ) -> None:
        self.tokenizer, self.ignored, self.only_last = tokenizer, ignored, only_last
        self.end: Sequence[int] = ()
        try:
            tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"{needed_by} needs a chat template, but the tokenizer has none; choose another model.tokenizer"
            ) from None
        self.end = self._end()

    def _end(self) -> Sequence[int]:
        """Return the tokens that end a conversation, see `end`. Log a warning if the model will not learn to stop."""
        user, assistant = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
        try:
            (alone,) = self.render_counted([user, assistant], None, [1])
            shown = str(self.render_counted([user, assistant, user, assistant], None, [1, 3])[-1])
            start, end = alone.counted[-1]
        except Exception:  # a template may refuse these messages; those of the data have their own errors
            return []
        if alone.text[start:end].rpartition(ANSWER)[2].strip():
            return []
        if alone.text[end:].strip():
            logger.warning(
                "the chat template does not mark the end of the assistant's turn: %r, where the loss counts [[...]]. So the "
                "model does not learn to stop; move the end into {%% generation %%}",
                shown,
            )
            return []
        token = self.tokenizer.eos_token_id
        added = "the loss counts none" if token is None else "the end-of-sequence token follows the last answer"
        logger.warning("the chat template shows no end of the assistant's turn: %r; %s", shown, added)
        return [] if token is None else [token]

    def __call__(self, messages: Sequence[Message], tools: Any = None) -> list[Sample]:
        """Render a conversation as one sample, or as one for each of the assistant's turns if the template changes
        earlier turns. Messages after the last one that counts are left out. Returns nothing if none counts.
        """
        by_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not by_assistant:
            raise UserError("no message has the role 'assistant'; remove the record")
        wanted = [i for i in by_assistant[-1 if self.only_last else 0 :] if is_counted(messages[i])]
        if not wanted:
            return []
        plain = [{key: each[key] for key in each if key not in WEIGHTS} for each in messages[: wanted[-1] + 1]]
        try:
            rendered = self.render_counted(plain, tools, wanted)
            self.note_ignored(plain, tools)
        except UserError:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise UserError(f"the chat template fails for these messages: {first_line(error)}") from None
        if not any(start < end for each in rendered for start, end in each.counted):
            does = (
                "marks no text with {% generation %}"
                if is_marked(self.template(tools))
                else "adds no text for the assistant"
            )
            raise UserError(
                f"the chat template {does} in this conversation, so the loss would count nothing; correct the template, or "
                f"remove the record"
            )
        return rendered

    def template(self, tools: Any) -> str:
        return without_clock(self.tokenizer.get_chat_template(tools=tools))

    def render_counted(self, messages: list[Message], tools: Any, wanted: list[int]) -> list[Sample]:
        """Render a conversation, of which the loss counts the messages with the given numbers."""
        if not is_marked(self.template(tools)):
            return self.render_turns(messages, tools, wanted)
        text, ranges = self.render_marked(messages, tools)
        by_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(wanted) < len(by_assistant):
            if len(ranges) != len(by_assistant):
                raise UserError(
                    f"the chat template marks {len(ranges)} texts for {len(by_assistant)} messages of the assistant, so "
                    f"single messages cannot be left out of the loss; correct the template, or remove the record"
                )
            ranges = [each for i, each in zip(by_assistant, ranges, strict=True) if i in wanted]
        return [Sample(text, ranges, end=self.end)]

    def render_turns(self, messages: list[Message], tools: Any, wanted: list[int]) -> list[Sample]:
        """Render a conversation with a template without marks."""
        turns = []
        for i in wanted:
            if i == 0:
                raise UserError(
                    "message 1 is the assistant's, and the chat template does not show where that turn begins; mark the turns "
                    "in the template with {% generation %}, or remove the record"
                )
            after = self.render(messages[: i + 1], tools)
            begin = self.begin_of_answer(messages[:i], tools, after)
            if begin is None:
                raise UserError(
                    f"the chat template changes the text before message {i + 1} when it adds that message, so the "
                    f"assistant's turn cannot be told apart; mark it in the template with {{% generation %}}"
                )
            turns.append(Sample(after, [(begin, len(after))], end=self.end))
        if all(turns[-1].text.startswith(turn.text) for turn in turns):
            return [turns[-1]._replace(counted=[turn.counted[0] for turn in turns])]
        return turns

    def begin_of_answer(self, messages: list[Message], tools: Any, after: str) -> int | None:
        """Return the place in a rendered text where the answer to some messages begins, or None if there is none: after
        the beginning of the assistant's turn, as far as the answer has it. (Some templates begin a turn with `<think>`
        and a line break, but render an answer without reasoning as `<think></think>`.)
        """
        before = self.render(messages, tools, add_generation_prompt=True)
        if after.startswith(before):
            return len(before)
        plain, common = self.render(messages, tools), common_length(before, after)
        return common if after.startswith(plain) and common > len(plain) else None

    def render(self, messages: list[Message], tools: Any, **options: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools, chat_template=self.template(tools), tokenize=False, **options
        )
        return text

    def render_marked(self, messages: list[Message], tools: Any) -> tuple[str, Ranges]:
        """Render a conversation. Returns the text, and the ranges of characters that the template marks."""
        texts, marks = render_jinja_template(
            [[{key: value for key, value in each.items() if value is not None} for each in messages]],
            tools,
            chat_template=self.template(tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        joined: Ranges = []
        for start, end in marks[0]:  # a template may mark an answer and its end by themselves
            first = joined.pop()[0] if joined and joined[-1][1] == start else start
            joined.append((first, end))
        return texts[0], joined

    def note_ignored(self, messages: list[Message], tools: Any) -> None:
        """Count the keys without which the text is the same."""
        keys = {key for each in messages for key, value in each.items() if value is not None} - {"role", "content"}
        if not (keys or tools):
            return
        text = self.render(messages, tools)
        for key in keys:
            others = [{name: each[name] for name in each if name != key} for each in messages]
            self.ignored[key] += self.render(others, tools) == text
        self.ignored[TOOLS] += bool(tools) and self.render(messages, None) == text


class Conversations:
    """Converter of records with a list of messages, and any tools."""

    def __init__(self, column: str, template: ChatTemplate) -> None:
        self.column, self.template = column, template

    def __call__(self, record: Any) -> Iterator[Sample]:
        messages = messages_of(record.get(self.column)) if isinstance(record, dict) else None
        if not messages:
            raise UserError(
                f"dataset.messages_column={self.column!r} should have a list of messages there, each an object with the "
                f"texts 'role' and 'content', or 'from' and 'value'"
            )
        if is_counted({WEIGHT: record.get(WEIGHT)}):
            yield from self.template(messages, tools_of(record))


def common_length(one: str, other: str) -> int:
    """Return the number of characters with which two texts begin alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def check_texts(value: Any) -> None:
    """Raise UserError if a text in a value has a surrogate."""
    check_characters(json.dumps(value, ensure_ascii=False, default=str))
