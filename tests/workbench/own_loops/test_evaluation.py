"""The loss of a model on a text, and its continuation of a prompt, against transformers."""

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from tests.support.examples import load, save_model
from tests.support.program import arguments, run
from tests.support.samples import write_jsonl

TEXT = "".join(f"line {i}: naïve text, ☃ {i * i}\n" for i in range(150))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


def expected(folder: str, length: int) -> tuple[int, float, float]:
    """Return the number of tokens, the loss and the bits per byte of TEXT, in rows of `length` tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    ids = torch.tensor([*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id])
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(ids) - 1, length):
            row = ids[first : first + length + 1]
            total += F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum").item()
    size = len(tokenizer.decode(ids[1:-1]).encode())
    return len(ids) - 1, total / (len(ids) - 1), total / size / math.log(2)


def words_of(model: str, dp: int, batch: int, **keys: Any) -> list[str]:
    """Return the words of train.py for a pretrained model, in rows of 24 tokens, one micro-batch in each step."""
    keys |= {"model.name": model, "model.tokenizer": "null", "model.num_hidden_layers": "null"}
    keys |= {"model.pretrained": "true", "training.seq_length": 24, "training.gradient_accumulation_steps": 1}
    return arguments(Path(model).parent / "run", dp, batch, **keys)


@pytest.mark.processes
def test_the_loss_on_a_text_equals_that_of_transformers(model: str, tmp_path: Path) -> None:
    """No row is full of counted targets in the last global batch, which has three sequences of each rank."""
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": TEXT}])
    result = run("train.py", *words_of(model, 2, 3, **{"distributed.cp_size": 2}), "--evaluate", path)
    targets, loss, bits = expected(model, 24)
    line = f"{path}: {targets:,} tokens | loss {loss:.4f} | {bits:.4f} bits per byte\n"
    assert result.stdout.count(line) == 1, result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_a_run_shows_how_the_model_continues_a_prompt(model: str, tmp_path: Path) -> None:
    """Before the first step, as transformers does."""
    (path := tmp_path / "text.txt").write_text(TEXT)
    keys = {"logging.sample_prompt": "line 3: na", "dataset.name": path}
    result = run("train.py", *words_of(model, 1, 1, **keys))
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), load(model)
    ids = tokenizer("line 3: na", return_tensors="pt")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    room = 24 + 1 - ids["input_ids"].size(1)  # the model reads every token but the last
    text = oracle.generate(**ids, max_new_tokens=room, do_sample=False, **ends)[0]
    expected_text = tokenizer.decode(text, skip_special_tokens=True).removeprefix("line 3: na")
    first = next(line for line in result.stdout.splitlines() if line.startswith("sample: "))
    assert ast.literal_eval(first.removeprefix("sample: ")) == expected_text
