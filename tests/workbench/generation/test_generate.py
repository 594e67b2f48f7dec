"""generate.py: text and files of completions from one process and several, and what is wrong in one sentence."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaForCausalLM, MistralForCausalLM

from picotron.console import UserError
from tests.fuzz.tokenizer_kinds import make_tokenizer
from tests.support.oracle import tiny_llama
from tests.support.program import TORCHRUN, run
from tests.support.samples import read_jsonl
from tests.workbench.generation.conftest import Complete, continued, save_generator
from workbench.generation.program import load_model
from workbench.generation.prompts import Encoder, read_prompts
from workbench.generation.rotation import generate as generate_tokens
from workbench.generation.sampling import Sampling

TEXTS = ["def f", "x", "class A", "", "return x + 1", "d", "pass"]


def test_program_prints_the_text_of_transformers_and_obeys_the_seed(
    folder: Path, generate: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    generate(folder.parent, "--prompt", "def f", "--max_new_tokens", 20)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(tokenizer("def f")["input_ids"] + continued(folder, "def f"), skip_special_tokens=True)
    assert capsys.readouterr().out == f"{folder}:\n{text}\n"
    sampled = []
    for seed in (1, 1, 2):
        generate(folder, "--temperature", 1, "--top_k", 50, "--seed", seed)
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_text_ends_at_any_end_token_of_the_model_as_with_transformers(
    folder: Path, where: str, complete: Complete
) -> None:
    prompts, words = ["def f", "class A"], ("--max_new_tokens", 20)
    first, second = (line["tokens"] for line in complete(folder, prompts, *words))
    ends = [0, first[3], second[5]]
    for name in ("config.json", "generation_config.json"):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(data | {"eos_token_id": ends if name == where else 0}))
    if where == "config.json":
        (folder / "generation_config.json").unlink()
    for text, line in zip(prompts, complete(folder, prompts, *words), strict=True):
        *tokens, end = continued(folder, text)
        assert line["tokens"] == tokens
        assert end in ends[1:]
        assert len(tokens) < 6


def test_a_prompt_has_the_tokens_of_training(tmp_path: Path) -> None:
    """The start token, but no other that a tokenizer adds, such as T5's end token and BERT's [CLS]."""
    make_tokenizer("metaspace first").save_pretrained(tmp_path / "start")
    make_tokenizer("ByT5").save_pretrained(tmp_path / "end")
    start, end = Encoder.read(tmp_path / "start"), Encoder.read(tmp_path / "end")
    assert start.encode_text("ab")[0] == start.tokenizer.bos_token_id
    rendered = start.tokenizer.bos_token + "ab"
    assert start.encode_text(rendered).count(start.tokenizer.bos_token_id) == 1
    assert end.encode_text("a") == end.tokenizer("a", add_special_tokens=False)["input_ids"]
    assert end.encode_text("") == [end.tokenizer.eos_token_id]
    assert end.encode_text("ab</s>")[-1] == end.tokenizer.eos_token_id  # asked for
    other = start.tokenizer.bos_token_id + 1
    start.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", other)])
    assert start.encode_text("ab") == start.tokenizer("ab", add_special_tokens=False)["input_ids"]


@pytest.mark.usefixtures("_end_process_group")
def test_text_stays_within_the_sliding_window(tmp_path: Path) -> None:
    """The model reads every token but the last, so 5 + 8 tokens fit into a window of 12."""
    MistralForCausalLM(tiny_llama("mistral", sliding_window=12, vocab_size=300)).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert len(generate_tokens(model, [[1, 2, 3, 4, 5]], Sampling(8))[0].tokens) == 8
    with pytest.raises(UserError, match=r"max_new_tokens=9, .* 12"):
        generate_tokens(model, [[1, 2, 3, 4, 5]], Sampling(9))


# ---------------------------------------------------------------------------------------------------- files of prompts


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one["log_probs"] == pytest.approx(other["log_probs"], rel=1e-9)
        assert one | {"log_probs": 0} == other | {"log_probs": 0}


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """Folder of a model that draws all tokens, also the end token, about equally often."""
    return save_generator(tmp_path / "model", 0.02)


def test_lines_of_the_output(even: Path, complete: Complete) -> None:
    """That log-probabilities are those of transformers is tested without files."""
    tokenizer = AutoTokenizer.from_pretrained(even)
    words = ("--temperature", 1, "--top_p", 0.99, "--max_new_tokens", 300, "--seed", 3)
    lines = complete(even, TEXTS, *words)
    assert [line["prompt"] for line in lines] == TEXTS
    assert len({len(line["tokens"]) for line in lines}) > 1
    for line in lines:
        assert tokenizer.eos_token_id not in line["tokens"]
        prompt = tokenizer(line["prompt"])["input_ids"] or [tokenizer.eos_token_id]
        assert len(line["log_probs"]) == len(line["tokens"])
        both = tokenizer.decode(prompt + line["tokens"], skip_special_tokens=True)
        assert line["prompt"] + line["text"] == both
    # Neither the format of the file nor the size of the batches changes anything.
    prompts = [{"prompt": text, "other": 1} for text in TEXTS]
    assert_same(complete(even, prompts, *words, "--batch_size", 3), lines)


def test_several_samples_are_consecutive_lines(even: Path, complete: Complete) -> None:
    """The lines are those of a file that repeats each prompt, whatever the size of the batches."""
    lines = complete(even, TEXTS, "--temperature", 1, "--num_return_sequences", 3, "--batch_size", 2)
    assert_same(lines, complete(even, [text for text in TEXTS for _ in range(3)], "--temperature", 1))
    assert len({tuple(line["tokens"]) for line in lines}) == 21


@pytest.mark.processes
@pytest.mark.slow
def test_several_processes_write_the_same_file(even: Path, tmp_path: Path, complete: Complete) -> None:
    words: list[object] = ["--temperature", 1, "--max_new_tokens", 200, "--batch_size", 5, "--num_return_sequences", 2]
    expected, output = complete(even, TEXTS, *words), tmp_path / "several.jsonl"
    words += ["--checkpoint", even, "--prompts", tmp_path / "prompts.txt", "--output", output]
    words += ["--pp_size", 2, "--tp_size", 2]
    for launcher in ([], [*TORCHRUN, "8"]):  # the latter with two data-parallel ranks
        output.unlink(missing_ok=True)
        run(*launcher, "generate.py", *words)
        assert_same(read_jsonl(output), expected)


@pytest.mark.processes
def test_ranks_with_other_prompts_are_an_error(even: Path, tmp_path: Path) -> None:
    """Machines that share no folder can have other files of a name. Tensor-parallel ranks would add up two prompts."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "prompts.txt").write_text("xy"[rank])
    script = f'cd {tmp_path}/$RANK; exec {sys.executable} {Path("generate.py").resolve()} "$@"'
    words = ["--checkpoint", even, "--tp_size", 2, "--prompts", "prompts.txt", "--output", "out.jsonl"]
    done = run(*TORCHRUN, 2, "--no-python", "bash", "-c", script, "generate", *words, code=1)
    assert "rank 1 has prompts.txt, line 1, with hash=" in done.stderr


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl, line 2, is not valid JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"text": "a"}\n', 'line 3, should be an object with a "prompt" or "messages"'),
        ("p.jsonl", b'{"prompt": "a", "messages": "b"}\n', "line 1, has the keys prompt and messages"),
        ("p.txt", b"a\nb\xff\n", "p.txt, line 2, is not valid UTF-8"),
        ("p.txt", b"", "p.txt has no prompts"),
        ("p.txt", b"\xef\xbb\xbfa\n[<\n", {1: {"prompt": "a"}, 2: {"prompt": "[<"}}),  # a text, and no JSON
        *(
            ("p.jsonl", json.dumps({key: value, "tools": [], "other": 1}).encode(), {1: {found: value} | more})
            for key in ("prompt", "messages")
            for found, value, more in (("prompt", "a", {}), ("messages", MESSAGES, {"tools": []}))
        ),
    ],
)
def test_prompts_are_read_or_their_broken_line_is_named(
    tmp_path: Path, name: str, content: bytes, expected: dict[int, Any] | str
) -> None:
    (tmp_path / name).write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read_prompts(tmp_path / name)
    else:
        assert read_prompts(tmp_path / name) == {f"{tmp_path / name}, line {i},": expected[i] for i in expected}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pp_size 2", "pp_size=2 x tp_size=1 needs a multiple of 2 processes"),
        ("--top_p 0", "top_p=0.0"),
        pytest.param("--output /dev/full", "/dev/full: No space left on device", marks=pytest.mark.linux),
        ("--checkpoint DAMAGED", "damaged: .* NaN"),
    ],
)
def test_a_run_that_fails_leaves_the_old_output(
    even: Path, tmp_path: Path, words: str, message: str, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words.startswith("--pp_size"):  # as torchrun sets them
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    if "DAMAGED" in words:
        model = LlamaForCausalLM.from_pretrained(even)
        model.model.norm.weight.data[3] = math.nan
        for each in (model, AutoTokenizer.from_pretrained(even)):
            each.save_pretrained(tmp_path / "damaged")
    (tmp_path / "out.jsonl").write_text("results of yesterday\n")
    with pytest.raises(UserError, match=message):
        complete(even, TEXTS, *words.replace("DAMAGED", str(tmp_path / "damaged")).split())
    assert (tmp_path / "out.jsonl").read_text() == "results of yesterday\n"
