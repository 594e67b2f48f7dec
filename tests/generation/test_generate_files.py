"""generate.py with files of prompts, in one process and in several, which must give the same completions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import generate as program
from conformance.oracle import tiny_llama
from picotron.console import UserError
from picotron.data.tokens import train_bpe
from picotron.generation.prompts import read_prompts
from tests.support.program import TORCHRUN

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


def test_lines_of_the_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    printed = capsys.readouterr()
    assert printed.out == f"7 completions in {tmp_path / 'one.jsonl'}\n"
    assert "Generating: 100%" in printed.err
    # Neither the format of the file nor the size of the batches changes anything.
    assert_same(complete(monkeypatch, folder, write_prompts(tmp_path / "p.jsonl"), *words, "--batch_size", 3), lines)


def test_several_samples_are_consecutive_lines_and_no_text_is_too_short(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines are those of a file that repeats each prompt, whatever the size of the batches."""
    prompts, words = write_prompts(tmp_path / "prompts.txt"), ("--temperature", 1, "--min_new_tokens", 20)
    samples = ("--num_return_sequences", 3, "--batch_size", 2)
    lines = complete(monkeypatch, folder, prompts, *words, *samples)
    assert capsys.readouterr().out == f"21 completions in {tmp_path / 'one.jsonl'}\n"
    assert [line["prompt"] for line in lines] == [text for text in TEXTS for _ in range(3)]
    assert len({tuple(line["tokens"]) for line in lines}) == 21
    assert min(len(line["tokens"]) for line in lines) >= 20
    (tmp_path / "prompts.txt").write_text("".join(f"{text}\n" * 3 for text in TEXTS))
    assert_same(lines, complete(monkeypatch, folder, prompts, *words))


def run(folder: Path, prompts: Path, processes: int, *words: object) -> subprocess.Popen[str]:
    output = prompts.with_name("several.jsonl")
    arguments = ["--checkpoint", folder, "--prompts", prompts, "--output", output, *words]
    return subprocess.Popen(
        [*TORCHRUN, str(processes), "generate.py", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "pp", "tp"), [(4, 2, 2)])
def test_several_processes_write_the_same_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, pp: int, tp: int
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    words = ("--temperature", 1, "--max_new_tokens", 200, "--batch_size", 5, "--num_return_sequences", 2)
    expected = complete(monkeypatch, folder, prompts, *words)
    process = run(folder, prompts, processes, *words, "--pp_size", pp, "--tp_size", tp)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert_same(lines_of(tmp_path / "several.jsonl"), expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"p.jsonl, line 2, is not valid JSON: .* column 12"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"text": "a"}\n', r'line 3, should be an object with a text "prompt"'),
        ("p.jsonl", b'{"prompt": "\xff"}\n', r"line 1, is not valid UTF-8; save the file as UTF-8"),
        ("p.jsonl", b'{"prompt": "\\ud800"}\n', r"line 1, the text has an unpaired surrogate"),
        (
            "p.jsonl",
            b'{"messages": []}\n',
            r'line 1, should have a list of "messages", each with two texts: {"messages": ',
        ),
        (
            "p.jsonl",
            b'{"messages": [{"role": "user", "content": "a"}], "tools": 5}\n',
            r"line 1, the column 'tools' should have a list of JSON schemas",
        ),
        ("p.txt", b"a\nb\xff\n", r"p.txt, line 2, is not valid UTF-8; save the file as UTF-8"),
        ("p.txt", b"", r"p.txt has no prompts; write one on each line"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("world_size", "words", "message"),
    [
        (
            1,
            ["--pp_size", "2"],
            "pp_size=2 x tp_size=1 needs a multiple of 2 processes, but 1 started; use torchrun .* 2",
        ),
        (4, ["--distributed.pp_size", "4"], "needs at least 4 layers, one per stage, but num_hidden_layers=3"),
        (1, ["--top_p", "0"], "top_p=0.0 should be above 0 and at most 1"),
        (1, ["--output", "LOOP"], "cannot write --output .*: Too many levels of symbolic links; choose another file"),
        (1, ["--output", "/dev/full"], "cannot write --output /dev/full: No space left on device; choose another file"),
    ],
)
def test_layouts_and_outputs_that_do_not_work(
    folder: Path, tmp_path: Path, world_size: int, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    (tmp_path / "o").write_text("results of yesterday\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    words = [word.replace("LOOP", str(tmp_path / "loop")) for word in words]
    arguments = ["--checkpoint", folder, "--prompts", write_prompts(tmp_path / "p.txt"), "--output", tmp_path / "o"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments), *words])
    with pytest.raises(UserError, match=message):
        program.main()
    assert (tmp_path / "o").read_text() == "results of yesterday\n"


def test_a_checkpoint_that_is_written_while_ranks_start_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "run_on_all_ranks", lambda name: [name(), "step_00000160"])
    with pytest.raises(UserError, match=r"some ranks read \w+ and others step_00000160, .*; name one of them"):
        complete(monkeypatch, folder, write_prompts(tmp_path / "p.txt"))


def test_a_byte_order_mark_is_not_a_part_of_the_first_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfa\nb\n")
    prompts = read_prompts(tmp_path / "p.txt")
    assert prompts == {f"{tmp_path}/p.txt, line {row},": {"prompt": text} for row, text in ((1, "a"), (2, "b"))}


def test_a_prompt_that_the_model_cannot_read_is_named_before_anything_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_bpe(iter(["def f(x): return x + 1", "class A: pass"]), 300)
    LlamaForCausalLM(tiny_llama(vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "p.txt").write_text("a\nb\nc <new>\n")
    with pytest.raises(UserError, match=r"p\.txt, line 3, has a token that is not in the vocabulary of \d+ tokens"):
        complete(monkeypatch, tmp_path, tmp_path / "p.txt", "--batch_size", 1)
    (tmp_path / "p.txt").write_text("a\n\n" + "word " * 10_000 + "\n")
    with pytest.raises(UserError, match=r"p\.txt, line 3, has [\d,]+ tokens, but texts end at 64 tokens"):
        complete(monkeypatch, tmp_path, tmp_path / "p.txt", "--batch_size", 1)
    assert not (tmp_path / "one.jsonl").exists()
