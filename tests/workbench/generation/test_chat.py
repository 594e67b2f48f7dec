"""Conversations: prompts of messages, answers that end, their text while it is drawn, and the terminal."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from conformance.fuzz.chat_templates import CHATML, TOOLS
from conformance.fuzz.tokenizer_kinds import KINDS, make_tokenizer
from tests.support.oracle import tiny_llama
from workbench.generation import program
from workbench.generation.prompts import CompletionPrinter, Encoder

pytestmark = pytest.mark.usefixtures("_end_process_group")
TEXT = " 日本語のテキスト 🙂👍🏽\n    def f(x):\n\n        return x + 1\nnaïve e\u0301."


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def save(folder: Path, kind: str = "byte-level") -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a tokenizer with a chat template and a float64 model whose tokens depend on all earlier ones."""
    tokenizer = save(tmp_path / "model")
    torch.manual_seed(0)
    config = tiny_llama(vocab_size=len(tokenizer), initializer_range=0.5, max_position_embeddings=400, eos_token_id=0)
    LlamaForCausalLM(config).double().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **keys: Any) -> None:
    """Change attributes of the tokenizer in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, value in keys.items():
        setattr(tokenizer, name, value)
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)


def answers_of_transformers(folder: Path, *questions: str, tokens: int = 20) -> list[str]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder, dtype="float64")
    contents: list[str] = []
    for question in questions:
        contents.append(question)
        text = tokenizer.apply_chat_template(conversation(*contents), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        end = tokenizer.eos_token_id
        output = model.generate(**ids, max_new_tokens=tokens, do_sample=False, eos_token_id=end, pad_token_id=0)
        contents.append(tokenizer.decode(output[0, ids.input_ids.size(1) :], skip_special_tokens=True))
    return contents[1::2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat(
    monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, *words: object, stdin: type[io.StringIO] = io.StringIO
) -> None:
    arguments = ["--checkpoint", folder, "--chat", "--max_new_tokens", 20, *words]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", stdin(lines))
    program.main()


# -------------------------------------------------------------------------------------------------- text and its tokens


@pytest.mark.parametrize("kind", KINDS)
def test_printed_text_is_that_of_all_tokens_without_halves_of_characters(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, parts = save(tmp_path, kind), list[str]()
    encoder = Encoder.read(tmp_path)
    monkeypatch.setattr("workbench.generation.prompts.print_line", lambda text, end: parts.append(text))
    prompt = encoder.encode_messages(conversation("hello"))
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    printer = CompletionPrinter(encoder, prompt)
    for token in tokens:
        printer.put(0, token)
    before_end = "".join(parts)
    text = encoder.completion(prompt, tokens)
    assert before_end == text  # it does not wait for the end
    printer.end(text)
    assert "".join(parts) == f"{text}\n"
    assert len(set(parts)) > 10
    assert "\ufffd" not in text


# --------------------------------------------------------------------------------------------------------------- --chat


def test_answer_ends_at_the_tokenizers_end_token_although_the_model_has_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(monkeypatch, folder, "hello\n")
    (full,) = answers_of_transformers(folder, "hello")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(full)["input_ids"]
    end = next(token for token in tokens[4:] if token not in tokens[:4])
    change(folder, eos_token=tokenizer.convert_ids_to_tokens(end))
    capsys.readouterr()
    chat(monkeypatch, folder, "hello\n")
    (cut,) = answers_of_transformers(folder, "hello")
    assert capsys.readouterr().out == f"> hello\n{cut}\n> \n"
    assert 0 < len(cut) < len(full)


def test_a_message_that_cannot_be_sent_is_dropped_and_the_conversation_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(monkeypatch, folder, f"hello\n{'a b ' * 300}\ndef f(x)\n", stdin=Terminal)
    first, second = map(re.escape, answers_of_transformers(folder, "hello", "def f(x)"))
    pattern = rf"> {first}\n> \([^\n]*texts end at 400 tokens[^\n]*\)\n> {second}\n> \n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------------ --prompts


def complete(monkeypatch: pytest.MonkeyPatch, folder: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompts, output = folder / "p.jsonl", folder / "o.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--checkpoint", folder, "--prompts", prompts, "--output", output, "--max_new_tokens", 20]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
    program.main()
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_messages_of_a_file_are_answered_and_stay_in_the_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder, chat_template=TOOLS + CHATML)
    messages, tools = conversation("hello", "Hello!", "def f(x)"), [{"type": "function", "function": {"name": "add"}}]
    lines = complete(monkeypatch, folder, [{"messages": messages}, {"messages": messages, "tools": tools, "id": 1}])
    assert (lines[1]["messages"], lines[1]["tools"]) == (messages, tools)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for line, given in zip(lines, (None, tools), strict=True):
        text = tokenizer.apply_chat_template(messages, given, tokenize=False, add_generation_prompt=True)
        (expected,) = complete(monkeypatch, folder, [{"prompt": text}])
        assert (line["text"], line["tokens"]) == (expected["text"], expected["tokens"])
    assert lines[0]["text"] != lines[1]["text"]
