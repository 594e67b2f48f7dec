"""Conversations: prompts of messages, answers that end, their text while it is drawn, and the terminal."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

import generate as program
from conformance.fuzz.chat_templates import CHATML, TEMPLATES, TOOLS
from conformance.fuzz.tokenizer_kinds import KINDS, make_tokenizer
from conformance.oracle import tiny_llama
from picotron.data.samples import SampleEncoder
from picotron.generation.prompts import CompletionPrinter, Encoder
from tests.support.program import TORCHRUN

pytestmark = pytest.mark.usefixtures("_end_process_group")
TEXT = " 日本語のテキスト 🙂👍🏽\n    def f(x):\n\n        return x + 1\nnaïve e\u0301."


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def save(folder: Path, kind: str = "byte-level", template: str | None = CHATML) -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = template
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
    monkeypatch.setattr("picotron.generation.prompts.print_line", lambda text, end: parts.append(text))
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
    if tokenizer.is_fast:
        stream = DecodeStream(prompt, skip_special_tokens=True)
        assert text == "".join(stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens)


def test_bytes_that_are_no_character_are_printed_when_the_next_character_or_the_end_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save(tmp_path)
    first, letter = tokenizer("🙂")["input_ids"][0], tokenizer("a")["input_ids"][0]
    encoder = Encoder.read(tmp_path)
    printer = CompletionPrinter(encoder, [letter])
    printed = []
    for token in (first, letter, first):
        printer.put(0, token)
        printed.append(capsys.readouterr().out)
    assert printed == ["", "\ufffda", ""]
    printer.end(encoder.completion([letter], [first, letter, first]))
    assert capsys.readouterr().out == "\ufffd\n"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_has_the_tokens_of_training(kind: str, template: str, tmp_path: Path) -> None:
    tokenizer = save(tmp_path, kind, TEMPLATES[template])
    messages = conversation("hello", "Hello world!", "What is 2 + 2?", "It is 4.")
    encoder = SampleEncoder({"messages_column": "messages"}, tokenizer, int)
    (sample,) = encoder.convert({"messages": messages})
    place = sample.counted[-1][0]
    arrays = encoder.encode([sample._replace(text=sample.text[:place], counted=[(0, place)])])
    assert Encoder.read(tmp_path).encode_messages(messages[:-1]) == arrays["tokens"].tolist()


# --------------------------------------------------------------------------------------------------------------- --chat


def test_answers_are_those_of_transformers_to_the_whole_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ("hello", "def f(x)")
    chat(monkeypatch, folder, "hello\n\n  def f(x)  \n")
    first, second = answers_of_transformers(folder, *questions)
    assert capsys.readouterr().out == f"> hello\n{first}\n> def f(x)\n{second}\n> \n"
    assert answers_of_transformers(folder, questions[1]) != [second]


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
    assert full.startswith(cut)
    assert 0 < len(cut) < len(full)


def test_draws_depend_on_the_seed_and_on_the_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, chat_template="{{ messages[-1]['content'] if messages[-1]['role'] == 'user' else '' }}")
    printed = []
    for seed in (1, 1, 2):
        chat(monkeypatch, folder, "a\na\n", "--temperature", 3, "--seed", seed)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    first, second = re.findall("> a\n(.+?)\n(?=> )", printed[0], re.DOTALL)
    assert first != second  # of the same prompt


@pytest.mark.parametrize(
    ("message", "template", "problem"),
    [
        (
            "a b " * 300,
            CHATML,
            "the conversation with it has [0-9]+ tokens, but texts end at 400 tokens; use a shorter one",
        ),
        (
            "fail",
            "{{ raise_exception('no') if messages[-1].content == 'fail' }}" + CHATML,
            "the chat template fails .*: no",
        ),
    ],
    ids=["too long", "not rendered"],
)
def test_a_message_that_cannot_be_sent_is_dropped_and_the_conversation_goes_on(
    folder: Path,
    message: str,
    template: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder, chat_template=template)
    chat(monkeypatch, folder, f"hello\n{message}\ndef f(x)\n", stdin=Terminal)
    first, second = map(re.escape, answers_of_transformers(folder, "hello", "def f(x)"))
    pattern = rf"> {first}\n> \(The message is dropped: {problem}\.\)\n> {second}\n> \n"
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
    records = [{"messages": messages}, {"prompt": "hello"}, {"messages": messages, "tools": tools}]
    lines = complete(monkeypatch, folder, [record | {"id": 1} for record in records])
    assert [{key: line[key] for key in line.keys() & {"prompt", "messages", "tools"}} for line in lines] == records
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(messages, given, tokenize=False, add_generation_prompt=True)
        for given in (None, tools)
    ]
    assert texts[0] != texts[1]
    expected = complete(monkeypatch, folder, [{"prompt": text} for text in texts])
    for line, other in zip(lines[::2], expected, strict=True):
        assert (line["text"], line["tokens"]) == (other["text"], other["tokens"])
        assert line["log_probs"] == pytest.approx(other["log_probs"], rel=1e-9)
    assert len({line["text"] for line in lines}) == 3


# -------------------------------------------------------------------------------------------------------- as a program


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("words", [["--distributed.tp_size", "2"]], ids=" ".join)
def test_several_processes_hold_the_conversation_of_one(folder: Path, words: list[str]) -> None:
    command = [*TORCHRUN, words[1], "generate.py", "--checkpoint", str(folder), "--chat", "--max_new_tokens", "20"]
    done = subprocess.run(
        [*command, *words], input="hello\ndef f(x)\n", capture_output=True, text=True, timeout=120, check=False
    )
    first, second = answers_of_transformers(folder, "hello", "def f(x)")
    assert done.stdout == f"> hello\n{first}\n> def f(x)\n{second}\n> \n", done.stderr
    assert done.returncode == 0
