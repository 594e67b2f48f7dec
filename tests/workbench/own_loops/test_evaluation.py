"""The loss of a model on a text, and its continuation of a prompt, against transformers."""

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.oracle import tiny_llama
from tests.support.program import options, run
from tests.support.samples import write_jsonl

TEXT = "".join(f"line {i}: naïve text, ☃ {i * i}\n" for i in range(150))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    vocabulary = AutoTokenizer.from_pretrained(tokenizer)
    LlamaForCausalLM(tiny_llama(vocab_size=len(vocabulary))).double().save_pretrained(folder)
    vocabulary.save_pretrained(folder)
    return folder


def expected(folder: Path, length: int) -> tuple[int, float, float]:
    """Return the number of tokens, the loss and the bits per byte of TEXT, in rows of `length` tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id])
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(ids) - 1, length):
            row = ids[first : first + length + 1]
            total += F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum").item()
    size = len(tokenizer.decode(ids[1:-1]).encode())
    return len(ids) - 1, total / (len(ids) - 1), total / size / math.log(2)


def words_of(model: Path, layout: dict[str, int], **keys: Any) -> list[str]:
    """Return options of train.py for a pretrained model in float64, in rows of 24 tokens."""
    keys |= {f"distributed.{axis}": layout.get(axis, 1) for axis in ("dp_size", "pp_size", "cp_size", "tp_size")}
    keys |= {"model.name": model, "model.tokenizer": "null", "model.num_hidden_layers": "null"}
    keys |= {"model.pretrained": "true", "model.dtype": "float64", "training.seq_length": 24}
    return options(keys)


@pytest.mark.processes
def test_the_loss_on_a_text_equals_that_of_transformers(model: Path, home: Path, tmp_path: Path) -> None:
    """No row is full of counted targets in the last global batch, which has three sequences of each rank."""
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": TEXT}])
    sizes = {"training.micro_batch_size": 3, "training.gradient_accumulation_steps": 1}
    words = words_of(model, {"dp_size": 2, "cp_size": 2}, **sizes, **{"checkpoint.save_dir": tmp_path / "run"})
    result = run(home, *words, "--evaluate", path)
    targets, loss, bits = expected(model, 24)
    line = f"{path}: {targets:,} tokens | loss {loss:.4f} | {bits:.4f} bits per byte\n"
    assert result.stdout.count(line) == 1, result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_a_run_shows_how_the_model_continues_a_prompt(model: Path, home: Path, tmp_path: Path) -> None:
    """Before the first step, as transformers does."""
    (path := tmp_path / "text.txt").write_text(TEXT)
    training = {"total_train_steps": 1, "warmup_steps": 0, "eval_frequency": 1, "eval_steps": 1}
    keys = {f"training.{key}": value for key, value in training.items()} | {"logging.sample_prompt": "line 3: na"}
    words = words_of(model, {}, **keys, **{"dataset.name": path, "checkpoint.save_dir": tmp_path / "run"})
    result = run(home, *words)
    assert result.returncode == 0, result.stderr
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), LlamaForCausalLM.from_pretrained(model)
    ids = tokenizer("line 3: na", return_tensors="pt")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    room = 24 + 1 - ids["input_ids"].size(1)  # the model reads every token but the last
    text = oracle.generate(**ids, max_new_tokens=room, do_sample=False, **ends)[0]
    expected_text = tokenizer.decode(text, skip_special_tokens=True).removeprefix("line 3: na")
    first = next(line for line in result.stdout.splitlines() if line.startswith("sample: "))
    assert ast.literal_eval(first.removeprefix("sample: ")) == expected_text
