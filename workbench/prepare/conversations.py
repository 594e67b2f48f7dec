"""Conversations -> texts, through the tokenizer's chat template, with the ranges of characters that the loss counts."""

import contextlib
import copy
import datetime
import functools
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from picotron.console import UserError
from workbench.console import first_line
from workbench.files import parse_json
from workbench.prepare.documents import SYSTEM, TOOLS, WEIGHT
from workbench.prepare.template_marks import Conversation, Marks
from workbench.prepare.text import check_characters

logger = logging.getLogger("picotron")

T = TypeVar("T")
Message = dict[str, Any]
Ranges = list[tuple[int, int]]

WEIGHTS = (WEIGHT, "train")  # keys of a message that say whether the loss counts it
# What their values mean, as texts: a .csv file has no other.
COUNTED = dict.fromkeys(("0", "0.0", "false"), False) | dict.fromkeys(("1", "1.0", "true", "none", ""), True)
# Roles of ShareGPT's "from". An observation is the result of a tool.
ROLES = {"human": "user", "observation": "tool"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
# Some templates print today's date. The same data should have the same tokens on all days and machines, so they get
# this one, which is also Llama 3's default.
DATE = datetime.datetime(2024, 7, 26)
QUESTION, ANSWER = "QUESTION", "ANSWER"
MARK = "4815162342"  # a key that shows how a template prints the arguments of a call


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


def is_marked(template: str) -> bool:
    """Return whether a chat template has {% generation %}."""
    return re.search(r"{%-?\s*generation\b", template) is not None


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


def messages_of(value: Any) -> list[Message] | None:
    """Return the messages of a value, or None if it has none: a list of messages, each with "role" and "content", or
    with "from" and "value" as in ShareGPT; or such a list as JSON text. A content is a text, a list of texts, or null.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, "the text with messages")
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    messages = [message_of(each) for each in value]
    for each in messages:
        if not isinstance(each.get("role"), str) or not isinstance(each.get("content"), str | None):
            return None
    check_texts(messages)
    return messages


def message_of(value: Message) -> Message:
    """Return a message with "role" and "content", which is a text if it can be one."""
    if {"from", "value"} <= value.keys():
        others = {key: value[key] for key in value if key not in ("from", "value")}
        if value["from"] == "function_call":
            return {"role": "assistant"} | call_of(value["value"]) | others
        value = {"role": ROLES.get(str(value["from"]), value["from"]), "content": value["value"]} | others
    parts = value.get("content")
    if isinstance(parts, list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                "a content has a part that is no text, such as an image, which no model here reads; remove the record"
            )
        value = value | {"content": "\n".join(texts)}  # as vLLM joins them
    return value


def call_of(value: Any) -> Message:
    """Return the content of a message that calls tools, which ShareGPT has as JSON text."""
    try:
        calls = json.loads(value)
        functions = [
            {"name": each["name"], "arguments": each["arguments"]}
            for each in ([calls] if isinstance(calls, dict) else calls)
        ]
    except (TypeError, ValueError, KeyError):
        return {"content": value}
    return {"content": "", "tool_calls": [{"type": "function", "function": each} for each in functions]}


def calls_of(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the functions, each with its arguments, of all calls of tools in messages."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and "arguments" in function:
                yield function


def with_arguments(messages: Sequence[Message], kind: type) -> list[Message]:
    """Return messages whose calls of tools have their arguments as objects (dict), or as JSON texts (str)."""
    changed = copy.deepcopy([*messages])
    for function in calls_of(changed):
        if not isinstance(given := function["arguments"], kind):
            with contextlib.suppress(TypeError, ValueError):
                other = json.loads(given) if kind is dict else json.dumps(given, ensure_ascii=False)
                function["arguments"] = other if isinstance(other, kind) else given
    return changed


def objects_in(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the arguments of calls that are objects, and not empty."""
    found = [function["arguments"] for function in calls_of(messages)]
    return [each for each in found if each and isinstance(each, dict)]


def marked(messages: list[Message]) -> list[Message]:
    """Return messages whose arguments of calls, if they are objects, have one more key."""
    changed = copy.deepcopy(messages)
    for each in objects_in(changed):
        each[MARK] = None
    return changed


def in_some_form(messages: list[Message], render: Callable[[list[Message]], tuple[T, str]]) -> tuple[T, list[Message]]:
    """Render messages in the first form that a chat template takes: with the arguments of calls as objects, as most
    templates expect them, or as JSON texts, as OpenAI writes them; without a content, or with an empty one.

    Args:
        render: function that returns anything, and the text that the template prints. It may raise anything.

    Returns:
        What `render` returned, and the messages in that form.
    """
    whole = [each | {"content": each.get("content") or ""} for each in messages]
    first: Exception | None = None
    for form in [with_arguments(form, kind) for form in (messages, whole) for kind in (dict, str)]:
        try:
            rendered, text = render(form)
            as_python = (
                any(str(each) in text for each in objects_in(form)) and f"{MARK!r}: None" in render(marked(form))[1]
            )
        except UserError:
            raise
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template has a mistake in line {error.lineno}: {error.message}; correct it"
            ) from None
        except Exception as error:  # a template is a program
            first = first or error
        else:
            if not as_python:
                return rendered, form
    reason = first_line(first) if first else "it prints the arguments of a call as Python does"
    raise UserError(f"the chat template fails for these messages: {reason}; does it need tools, or other roles?")


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a record, which may also be a JSON text, or None."""
    tools = record.get(TOOLS)
    if isinstance(tools, str) and tools:  # a .csv file has "" for null
        tools = parse_json(tools, f"the text in column {TOOLS!r}")
    if tools in (None, ""):
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
    found = {key: COUNTED.get(str(values.get(key)).lower()) for key in WEIGHTS}
    for key, counted in found.items():
        if counted is None:
            raise UserError(f"{key}={values[key]!r} should be 0 or 1; the loss counts a text as a whole, or not at all")
    return all(found.values())


class ChatTemplate:
    """The chat template of a tokenizer.

    The loss counts what the template marks with {% generation %}. If the template has no such marks, the loss counts
    the text that it adds for a message of the assistant after the beginning of its turn, which `add_generation_prompt`
    renders.

    Args:
        needed_by: what needs a chat template, for an error.
        notes: gets the number of conversations in which something is not in the text, or not counted, see `Marks`.
        only_last: whether the loss counts the assistant's last turn only.

    Attributes:
        end: tokens after a conversation, which the loss counts: the end-of-sequence token if the template shows no
            other end of the assistant's last turn.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, needed_by: str, notes: Counter[str], only_last: bool
    ) -> None:
        self.tokenizer, self.notes, self.only_last = tokenizer, notes, only_last
        self.marks = Marks(self.text_of)
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

        def render(messages: list[Message]) -> tuple[list[Sample], str]:
            samples = self.render_counted(messages, tools, wanted)
            return samples, samples[-1].text

        rendered, plain = in_some_form(plain, render)
        ignored, uncounted = self.marks({"messages": plain, "tools": tools, "wanted": wanted})
        self.notes.update(f"the chat template ignores {name}" for name in ignored)
        self.notes.update(f"the loss does not count {name} of the assistant" for name in uncounted)
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
        plain = self.render(messages, tools)
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        common = sum(1 for _ in equal)
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

    def text_of(self, conversation: Conversation) -> tuple[str, str]:
        """Return what the template prints for a conversation, and what the loss counts of it."""
        samples = self.render_counted(**conversation)
        counted = (sample.text[start:end] for sample in samples for start, end in sample.counted)
        return "\n".join(sample.text for sample in samples), "\n".join(counted)


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
        if system := record.get(SYSTEM):
            if not isinstance(system, str) or messages[0]["role"] == SYSTEM:
                raise UserError(
                    f"the column {SYSTEM!r} should have the text of a system prompt there, and no message of that role "
                    f"beside it; rename the column if it has another purpose"
                )
            messages = [{"role": SYSTEM, "content": system}, *messages]
        if is_counted({WEIGHT: record.get(WEIGHT)}):
            yield from self.template(messages, tools_of(record))


def check_texts(value: Any) -> None:
    """Raise UserError if a text in a value has a surrogate."""
    check_characters(json.dumps(value, ensure_ascii=False, default=str))
