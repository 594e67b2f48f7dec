"""Prompts and completions as text: prompts of a file, conversations, and the tokenizer of a model's folder."""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from picotron.console import UserError
from workbench.console import first_line, print_line
from workbench.files import parse_json
from workbench.prepare.conversations import check_texts, in_some_form, messages_of, tools_of
from workbench.prepare.text import start_of
from workbench.run.model_config import ends_of

PROMPT_KEYS = ("prompt", "messages", "conversations")
Prompt = dict[str, Any]
"""{"prompt": text}, or {"messages": [{"role": text, "content": text}, ...]}, which may also have "tools": [...]"""


def read_prompts(path: Path) -> dict[str, Prompt]:
    """Read a prompt from each line of a file: the line of a .txt file, the key "prompt" or "messages" of a .jsonl file.

    Returns:
        The prompts, in order, by the name of their line.

    Raises:
        UserError: the file cannot be read, or a line has no prompt.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--prompts {path} should be a .txt file or a .jsonl file")
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise UserError(f"cannot read --prompts {path}: {error.strerror}; check the path") from None
    prompts = {}
    for name, line in ((f"{path}, line {row},", line) for row, line in enumerate(lines, 1)):
        if path.suffix == ".jsonl" and not line.strip():
            continue
        try:
            text = line.decode()
        except UnicodeError:
            raise UserError(f"{name} is not valid UTF-8; save the file as UTF-8") from None
        record = {"prompt": text} if path.suffix == ".txt" else parse_json(text, name)
        try:
            prompts[name] = prompt_of(record)
        except UserError as error:
            raise UserError(f"{name} {error}") from None
    if not prompts:
        raise UserError(f"--prompts {path} has no prompts; write one on each line")
    return prompts


def prompt_in(record: dict[str, Any]) -> Any:
    """Return the value of the key of a record that holds a prompt: "prompt", "messages", or "conversations" as in
    ShareGPT. Returns None if there is none of them. Raises a UserError if there are several.
    """
    names = [name for name in PROMPT_KEYS if record.get(name) is not None]
    if len(names) > 1:
        raise UserError(f"has the keys {' and '.join(names)}, of which only one can be the prompt; remove the other")
    return record[names[0]] if names else None


def prompt_of(record: Any) -> Prompt:
    """Return the prompt of a record, a text or messages, without the record's other keys, see `prompt_in`.

    Raises:
        UserError: the record has no prompt, or several.
    """
    value = prompt_in(record) if isinstance(record, dict) else None
    is_text = isinstance(value, str) and record.get("prompt") is not None  # not JSON, also if it begins with a bracket
    messages = None if is_text else messages_of(value)
    if not messages and isinstance(value, str):
        check_texts(value)
        return {"prompt": value}
    if not messages:
        raise UserError(
            'should be an object with a "prompt" or "messages", a text or a list of messages, each with two texts: '
            '{"messages": [{"role": "user", "content": "..."}]}'
        )
    tools = tools_of(record)
    return {"messages": messages} | ({} if tools is None else {"tools": tools})


class Encoder:
    """A tokenizer that encodes prompts and decodes completions.

    Args:
        folder: where the tokenizer comes from, for errors.
    """

    def __init__(self, tokenizer: Any, folder: Path | str) -> None:
        self.tokenizer, self.folder = tokenizer, folder

    @classmethod
    def read(cls, folder: Path) -> "Encoder":
        """Read the tokenizer of a model's folder. Raises a UserError if there is none."""
        try:
            return cls(AutoTokenizer.from_pretrained(folder), folder)
        except Exception as error:
            raise UserError(f"no tokenizer in {folder} ({first_line(error)}); save one there") from None

    def encode(self, name: str, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt of a file, see `encode_text` and `encode_messages`."""
        if "prompt" in prompt:
            return self.encode_text(prompt["prompt"])
        try:
            return self.encode_messages(**prompt)
        except UserError as error:
            raise UserError(f"{name} {error}") from None

    def encode_text(self, prompt: str) -> list[int]:
        """Return the tokens of a text as in training: with the tokenizer's start token unless the text begins with it,
        and no others that the tokenizer adds. An empty text is the end token.
        """
        ids = [*start_of(self.tokenizer).before(prompt), *self.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        if (ids := ids or [self.tokenizer.eos_token_id]) == [None]:
            raise UserError(
                f"the tokenizer of {self.folder} has no end-of-sequence token, which an empty prompt needs; use a prompt "
                f"with text"
            )
        return ids

    def encode_messages(self, messages: Any, tools: Any = None) -> list[int]:
        """Return the tokens of a conversation, as the chat template renders it, up to the beginning of an answer.

        Raises:
            UserError: see `check_chat_template`, or the template fails for the messages.
        """
        self.check_chat_template(tools)

        def render(messages: Any) -> tuple[list[int], str]:
            text = self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, return_dict=True)
            return ids["input_ids"], text

        return in_some_form(messages, render)[0]

    def check_chat_template(self, tools: Any = None) -> None:
        """Raise a UserError if the tokenizer has no chat template."""
        try:
            self.tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise UserError(
                f"the tokenizer of {self.folder} has no chat template, which renders messages; use a model that was "
                f"trained on conversations, or --prompt"
            ) from None

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer, see `ends_of`."""
        return ends_of(self.tokenizer)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def completion(self, prompt: list[int], new: list[int]) -> str:
        """Return the text of new tokens. (Alone, some tokenizers decode it without its first space.)"""
        before, text = self.decode(prompt), self.decode(prompt + new)
        return text.removeprefix(before) if text.startswith(before) else self.decode(new)


class CompletionPrinter:
    """Printer of a completion while its tokens are drawn.

    All tokens so far are decoded together, because the text of a token can depend on those before it. The bytes of a
    character can be split over several tokens. Until the last one is there, they decode to U+FFFD, which is held back.
    With SentencePiece, complete characters before them become U+FFFD again if they are spelled as bytes, too; they are
    not printed twice.
    (transformers' TextStreamer waits for the end of each word and, with SentencePiece, drops the first space of a line;
    DecodeStream of tokenizers does not know tokenizers written in Python, and drops a character that stays partial.)
    """

    def __init__(self, encoder: Encoder, prompt: Sequence[int]) -> None:
        self.encoder, self.prompt = encoder, list(prompt)
        self.tokens: list[int] = []
        self.printed = 0  # characters

    def put(self, _: int, token: int) -> None:
        """Append a token, and print the text that is complete. (This is an `on_token` of `generate`.)"""
        self.tokens.append(token)
        self._print(self.encoder.completion(self.prompt, self.tokens).rstrip("\ufffd"))

    def end(self, text: str) -> None:
        """Print the rest of the text of all tokens."""
        self._print(f"{text}\n")

    def _print(self, text: str) -> None:
        print_line(text[self.printed :], end="")
        self.printed = max(self.printed, len(text))
