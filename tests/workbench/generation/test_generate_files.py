"""generate.py with files of prompts, in one process and in several, which must give the same completions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from picotron.console import UserError
from tests.support.oracle import tiny_llama
from tests.support.program import TORCHRUN
from tests.support.samples import write_jsonl
from workbench.generation import program
from workbench.generation.prompts import prompt_of, read_prompts
from workbench.prepare.tokens import train_bpe

TEXTS = ["def f", "x", "class A", "", "return x + 1", "d", "pass"]


pytestmark = pytest.mark.usefixtures("_end_process_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer and of a float64 model that draws all tokens, also the end token, about equally often."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = tiny_llama(vocab_size=300, initializer_range=0.05, max_position_embeddings=4096, eos_token_id=0)
    LlamaForCausalLM(config).double().save_pretrained(folder)
    train_bpe(iter(["def f(x): return x + 1", "class A: pass"]), 300).save_pretrained(folder)
    return folder


def write_prompts(path: Path) -> Path:
    lines = TEXTS if path.suffix == ".txt" else [json.dumps({"prompt": text, "other": 1}) for text in TEXTS]
    path.write_text("\n".join(lines) + "\n")
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one["log_probs"] == pytest.approx(other["log_probs"], rel=1e-9)
        assert one | {"log_probs": 0} == other | {"log_probs": 0}


def complete(monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: Path, *words: object) -> list[dict[str, Any]]:
    """Run the program in this process, and return the lines of its output."""
    output = prompts.with_name("one.jsonl")
    arguments = ["--checkpoint", folder, "--prompts", prompts, "--output", output, *words]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    program.main()
    return lines_of(output)


def test_lines_of_the_output(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    words = ("--temperature", 1, "--top_p", 0.99, "--max_new_tokens", 300, "--seed", 3)
    lines = complete(monkeypatch, folder, write_prompts(tmp_path / "prompts.txt"), *words)
    assert [line["prompt"] for line in lines] == TEXTS
    lengths = {len(line["tokens"]) for line in lines}
    assert len(lengths) > 2
    for line in lines:
        assert tokenizer.eos_token_id not in line["tokens"]
        prompt = tokenizer(line["prompt"])["input_ids"] or [tokenizer.eos_token_id]
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + line["tokens"]])).logits[0].log_softmax(-1)
        expected = [log_probs[len(prompt) - 1 + i, token].item() for i, token in enumerate(line["tokens"])]
        assert line["log_probs"] == pytest.approx(expected, rel=1e-5)  # transformers' norms compute in float32
        both = tokenizer.decode(prompt + line["tokens"], skip_special_tokens=True)
        assert line["prompt"] + line["text"] == both
    # Neither the format of the file nor the size of the batches changes anything.
    assert_same(complete(monkeypatch, folder, write_prompts(tmp_path / "p.jsonl"), *words, "--batch_size", 3), lines)


def test_several_samples_are_consecutive_lines(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are those of a file that repeats each prompt, whatever the size of the batches."""
    prompts, words = write_prompts(tmp_path / "prompts.txt"), ("--temperature", 1)
    lines = complete(monkeypatch, folder, prompts, *words, "--num_return_sequences", 3, "--batch_size", 2)
    prompts.write_text("".join(f"{text}\n" * 3 for text in TEXTS))
    assert_same(lines, complete(monkeypatch, folder, prompts, *words))
    assert len({tuple(line["tokens"]) for line in lines}) == 21


@pytest.mark.processes
@pytest.mark.slow
def test_several_processes_write_the_same_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, output = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "several.jsonl"
    words = ["--temperature", "1", "--max_new_tokens", "200", "--batch_size", "5", "--num_return_sequences", "2"]
    expected = complete(monkeypatch, folder, prompts, *words)
    words += ["--checkpoint", str(folder), "--prompts", str(prompts), "--output", str(output)]
    words += ["--pp_size", "2", "--tp_size", "2"]
    for launcher in ([sys.executable], [*TORCHRUN, "8"]):  # the latter with two data-parallel ranks
        output.unlink(missing_ok=True)
        subprocess.run([*launcher, "generate.py", *words], timeout=120, check=True)
        assert_same(lines_of(output), expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl, line 2, is not valid JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"text": "a"}\n', 'line 3, should be an object with a "prompt" or "messages"'),
        ("p.jsonl", b'{"prompt": "a", "messages": "b"}\n', "line 1, has the keys prompt and messages"),
        ("p.txt", b"a\nb\xff\n", "p.txt, line 2, is not valid UTF-8"),
        ("p.txt", b"", "p.txt has no prompts"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_a_prompt_that_begins_with_a_bracket_is_a_text() -> None:
    assert prompt_of({"prompt": "[<"}) == {"prompt": "[<"}


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_prompts_and_messages_are_texts_or_lists(tmp_path: Path, key: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    records = [{key: "a", "other": 1}, {key: messages, "tools": []}]
    path = write_jsonl(tmp_path / "p.jsonl", records)
    assert [*read_prompts(Path(path)).values()] == [{"prompt": "a"}, {"messages": messages, "tools": []}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pp_size", "2"], "pp_size=2 x tp_size=1 needs a multiple of 2 processes"),
        (["--top_p", "0"], "top_p=0.0"),
        pytest.param(["--output", "/dev/full"], "/dev/full: No space left on device", marks=pytest.mark.linux),
    ],
)
def test_layouts_and_outputs_that_do_not_work(
    folder: Path, tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] == "--pp_size":  # as torchrun sets them
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    (tmp_path / "o").write_text("results of yesterday\n")
    arguments = ["--checkpoint", folder, "--prompts", write_prompts(tmp_path / "p.txt"), "--output", tmp_path / "o"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments), *words])
    with pytest.raises(UserError, match=message):
        program.main()
    assert (tmp_path / "o").read_text() == "results of yesterday\n"


def test_a_byte_order_mark_is_not_a_part_of_the_first_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfa\nb\n")
    prompts = read_prompts(tmp_path / "p.txt")
    assert prompts == {f"{tmp_path}/p.txt, line {row},": {"prompt": text} for row, text in ((1, "a"), (2, "b"))}
