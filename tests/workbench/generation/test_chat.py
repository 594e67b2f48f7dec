"""Conversations: prompts of messages, answers that end, their text while it is drawn, and the terminal."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.fuzz.chat_templates import CHATML, TOOLS
from tests.fuzz.tokenizer_kinds import KINDS
from tests.workbench.generation.conftest import Complete, continued, save_tokenizer
from workbench.generation.prompts import CompletionPrinter, Encoder

TEXT = " 日本語のテキスト 🙂👍🏽\n    def f(x):\n\n        return x + 1\nnaïve e\u0301."


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def change(folder: Path, name: str, value: str) -> None:
    """Change an attribute of the tokenizer in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    setattr(tokenizer, name, value)
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)


def answers_of_transformers(folder: Path, *questions: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    contents = []
    for question in questions:
        contents.append(question)
        text = tokenizer.apply_chat_template(conversation(*contents), tokenize=False, add_generation_prompt=True)
        tokens = continued(folder, text)
        end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else None
        contents.append(tokenizer.decode(tokens[:end], skip_special_tokens=True))
    return contents[1::2]


@pytest.mark.parametrize("kind", KINDS)
def test_printed_text_is_that_of_all_tokens_without_halves_of_characters(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, parts = save_tokenizer(tmp_path, kind)(TEXT, add_special_tokens=False)["input_ids"], []
    encoder = Encoder.read(tmp_path)
    monkeypatch.setattr("workbench.generation.prompts.print_line", lambda text, end: parts.append(text))
    prompt = encoder.encode_messages(conversation("hello"))
    printer, text = CompletionPrinter(encoder, prompt), encoder.completion(prompt, tokens)
    for token in tokens:
        printer.put(0, token)
    assert "".join(parts) == text  # it does not wait for the end
    printer.end(text)
    assert "".join(parts) == f"{text}\n"
    assert len(set(parts)) > 10
    assert "\ufffd" not in text


def test_answer_ends_at_the_tokenizers_end_token_although_the_model_has_another(
    folder: Path, generate: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (full,) = answers_of_transformers(folder, "hello")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(full)["input_ids"]
    end = next(token for token in tokens[4:] if token not in tokens[:4])
    change(folder, "eos_token", tokenizer.convert_ids_to_tokens(end))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    generate(folder, "--chat", "--max_new_tokens", 20)
    (cut,) = answers_of_transformers(folder, "hello")
    assert capsys.readouterr().out == f"> hello\n{cut}\n> \n"
    assert 0 < len(cut) < len(full)


def test_a_message_that_cannot_be_sent_is_dropped_and_the_conversation_goes_on(
    folder: Path, generate: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", terminal := io.StringIO(f"hello\n{'a b ' * 300}\ndef f(x)\n"))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    generate(folder, "--chat", "--max_new_tokens", 20)
    first, second = map(re.escape, answers_of_transformers(folder, "hello", "def f(x)"))
    pattern = rf"> {first}\n> \([^\n]*texts end at 400 tokens[^\n]*\)\n> {second}\n> \n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


def test_messages_of_a_file_are_answered_and_stay_in_the_output(folder: Path, complete: Complete) -> None:
    change(folder, "chat_template", TOOLS + CHATML)
    messages, tools = conversation("hello", "Hello!", "def f(x)"), [{"type": "function", "function": {"name": "add"}}]
    words, tokenizer = ("--max_new_tokens", 20), AutoTokenizer.from_pretrained(folder)
    lines = complete(folder, [{"messages": messages}, {"messages": messages, "tools": tools, "id": 1}], *words)
    assert (lines[1]["messages"], lines[1]["tools"]) == (messages, tools)
    for line, given in zip(lines, (None, tools), strict=True):
        text = tokenizer.apply_chat_template(messages, given, tokenize=False, add_generation_prompt=True)
        (expected,) = complete(folder, [{"prompt": text}], *words)
        assert (line["text"], line["tokens"]) == (expected["text"], expected["tokens"])
    assert lines[0]["text"] != lines[1]["text"]
