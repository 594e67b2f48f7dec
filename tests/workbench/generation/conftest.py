"""A small model to generate with, and functions that run generate.py in this process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.fuzz.chat_templates import CHATML
from tests.fuzz.tokenizer_kinds import make_tokenizer
from tests.support.examples import load, save_model
from tests.support.samples import read_jsonl, with_template, write_jsonl
from workbench.generation import program

Complete = Callable[..., list[dict[str, Any]]]


def save_tokenizer(folder: Path, kind: str = "byte-level") -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_generator(folder: Path, spread: float) -> Path:
    """Save a tokenizer with a chat template, and a model whose matrices have this standard deviation."""
    keys = {"initializer_range": spread, "max_position_embeddings": 400, "eos_token_id": 0}
    return Path(with_template(save_model(folder, **keys), CHATML))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a model whose tokens depend on all earlier ones, in the folder of a run."""
    return save_generator(tmp_path / "run" / "step_00000005", 0.5)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, _end_process_group: None) -> Callable[..., None]:
    """Function that runs generate.py."""

    def generate(folder: Path, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(folder), *map(str, words)])
        program.main()

    return generate


@pytest.fixture
def complete(generate: Callable[..., None], tmp_path: Path) -> Complete:
    """Function that runs generate.py on a file of prompts, and returns the lines of its output."""

    def complete(folder: Path, prompts: list[Any], *words: object) -> list[dict[str, Any]]:
        if isinstance(prompts[0], str):
            (file := tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
        else:
            write_jsonl(file := tmp_path / "prompts.jsonl", prompts)
        generate(folder, "--prompts", file, "--output", tmp_path / "out.jsonl", *words)
        return read_jsonl(tmp_path / "out.jsonl")

    return complete


def continued(folder: Path, text: str, tokens: int = 20) -> list[int]:
    """Return the tokens with which transformers continues a text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return output[0, ids["input_ids"].size(1) :].tolist()
