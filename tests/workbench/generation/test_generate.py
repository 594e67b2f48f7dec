"""generate.py: text and files of completions from one process and several, and what is wrong in one sentence."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MistralForCausalLM

from conformance.fuzz.tokenizer_kinds import make_tokenizer
from picotron.console import UserError
from tests.support.oracle import tiny_llama
from workbench.generation import program
from workbench.generation.program import load_model
from workbench.generation.prompts import Encoder
from workbench.generation.rotation import generate
from workbench.generation.sampling import Sampling
from workbench.prepare.tokens import train_bpe

pytestmark = pytest.mark.usefixtures("_end_process_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer and a model whose weights are so large that each token depends on the earlier ones."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_llama(vocab_size=300, initializer_range=0.5, eos_token_id=0)).save_pretrained(folder)
    train_bpe(iter(["def f(x): return x + 1", "class A: pass"]), 300).save_pretrained(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run generate.py, and return what it prints."""
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
    program.main()
    return capsys.readouterr().out


def test_program_prints_the_text_of_transformers_and_obeys_the_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("def f")["input_ids"]
    model = LlamaForCausalLM.from_pretrained(folder)
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False
    )
    text = run(monkeypatch, capsys, "--checkpoint", folder, "--prompt", "def f", "--max_new_tokens", 20)
    assert text == f"{folder}:\n{tokenizer.decode(expected[0], skip_special_tokens=True)}\n"
    sampled = [
        run(monkeypatch, capsys, "--checkpoint", folder, "--temperature", 1, "--top_k", 50, "--seed", seed)
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_text_ends_at_any_end_token_of_the_model_as_with_transformers(
    folder: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "prompts.txt").write_text("def f\nclass A\n")

    def complete() -> list[list[int]]:
        words = ["--prompts", tmp_path / "prompts.txt", "--output", tmp_path / "o.jsonl", "--max_new_tokens", 30]
        monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(tmp_path), *map(str, words)])
        program.main()
        return [json.loads(line)["tokens"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]

    first, second = complete()
    ends = [0, first[3], second[5]]
    for name in ("config.json", "generation_config.json"):
        data = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(data | {"eos_token_id": ends if name == where else 0}))
    if where == "config.json":
        (tmp_path / "generation_config.json").unlink()
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path)
    for text, tokens in zip(("def f", "class A"), complete(), strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert tokens == expected[0, ids.size(1) : -1].tolist()
        assert expected[0, -1] in ends[1:]
        assert len(tokens) < 6


def test_damaged_weights_are_one_sentence_and_the_old_output_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[3] = math.nan
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    (tmp_path / "prompts.txt").write_text("def f\n")
    (tmp_path / "o.jsonl").write_text("results of yesterday\n")
    words = ["--prompts", tmp_path / "prompts.txt", "--output", tmp_path / "o.jsonl"]
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(tmp_path), *map(str, words)])
    with pytest.raises(UserError, match=f"^{tmp_path}: .* NaN"):
        program.main()
    assert (tmp_path / "o.jsonl").read_text() == "results of yesterday\n"


def test_prompt_has_the_start_token_and_no_end_token(tmp_path: Path) -> None:
    make_tokenizer("metaspace first").save_pretrained(tmp_path / "start")
    make_tokenizer("ByT5").save_pretrained(tmp_path / "end")
    start, end = Encoder.read(tmp_path / "start"), Encoder.read(tmp_path / "end")
    assert start.encode_text("ab")[0] == start.tokenizer.bos_token_id
    rendered = start.tokenizer.bos_token + "ab"
    assert start.encode_text(rendered).count(start.tokenizer.bos_token_id) == 1
    assert end.encode_text("a") == end.tokenizer("a", add_special_tokens=False)["input_ids"]
    assert end.encode_text("") == [end.tokenizer.eos_token_id]
    assert end.encode_text("ab</s>")[-1] == end.tokenizer.eos_token_id  # asked for


def test_text_stays_within_the_sliding_window(tmp_path: Path) -> None:
    """The model reads every token but the last, so 5 + 8 tokens fit into a window of 12."""
    MistralForCausalLM(tiny_llama("mistral", sliding_window=12, vocab_size=300)).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert len(generate(model, [[1, 2, 3, 4, 5]], Sampling(8))[0].tokens) == 8
    with pytest.raises(UserError, match=r"max_new_tokens=9, .* 12"):
        generate(model, [[1, 2, 3, 4, 5]], Sampling(9))
