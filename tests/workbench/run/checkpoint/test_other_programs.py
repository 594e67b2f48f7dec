"""A checkpoint in programs that load Hugging Face model folders: it names all ends of a text, and transformers 4, which
reads other keys of config.json, has the same logits.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.models import FAMILIES
from tests.fuzz.chat_templates import CHATML
from tests.support.oracle import assert_close, tiny_llama
from workbench.run.checkpoint.writer import model_files

# The last version of transformers 4, which many programs that serve models still require, and what it depends on.
TRANSFORMERS_4 = ["transformers==4.57.3", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
LOGITS = """
import sys, torch, transformers
assert transformers.__version__.startswith("4.")
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    torch.save(model(torch.arange(256)[None] % 61).logits.detach(), folder + "/logits.pt")
    assert transformers.AutoTokenizer.from_pretrained(folder)("def f(x)")["input_ids"] == IDS
"""
ROPE = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip
TURN = 300  # <|im_end|>; the end-of-sequence token is 0


@pytest.mark.parametrize(
    ("end", "ends", "expected", "warns"),
    [
        ("<|im_end|>", None, [0, TURN], True),  # a base model whose template has turns
        ("<|im_end|>", [TURN], [0, TURN], False),
        ("<|im_end|>", [0, TURN], [0, TURN], False),
        ("", [TURN], [0, TURN], False),  # the template shows no end
        ("", [5, 0, 7], [0, 5, 7], False),
        ("", [7], 0, False),  # of the model's tokenizer, which was another one
        ("", 5, 0, False),
        ("", None, 0, False),
    ],
)
def test_a_checkpoint_names_all_ends(
    folder: str, caplog: pytest.LogCaptureFixture, end: str, ends: Any, expected: Any, warns: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = CHATML.replace("<|im_end|>", end)
    tokenizer.save_pretrained(folder)
    files = model_files(tiny_llama(vocab_size=len(tokenizer), eos_token_id=ends), "float32", Path(folder))
    for name in ("config.json", "generation_config.json"):
        assert json.loads(files[name])["eos_token_id"] == expected
    assert ("'<|im_end|>', which is no end" in caplog.text) == warns


@pytest.mark.parametrize(("length", "expected"), [(16, 64), (128, 128)])
def test_a_checkpoint_takes_texts_as_long_as_it_was_trained_on(length: int, expected: int) -> None:
    files = model_files(tiny_llama(max_position_embeddings=64), "float32", None, length)
    assert json.loads(files["config.json"])["max_position_embeddings"] == expected


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_transformers_4_has_the_same_logits_and_tokens(tmp_path: Path, folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "old")]
    subprocess.run([*pip, *TRANSFORMERS_4], check=True)
    ids, expected = torch.arange(256)[None] % 61, {}
    for family, rope in itertools.product(FAMILIES, ROPE):
        if (
            family == "olmo2" and rope["rope_type"] != "default"
        ):  # its config in transformers 4 knows an older name only
            continue
        config = tiny_llama(family, rope_parameters=rope, max_position_embeddings=512)
        model = AutoModelForCausalLM.from_config(config).float()
        path = tmp_path / f"{family}_{rope['rope_type']}"
        model.save_pretrained(path)
        for name, content in model_files(config, "float32", Path(folder)).items():
            (path / name).write_bytes(content)
        expected[path] = model(ids).logits.detach()
    tokens = AutoTokenizer.from_pretrained(folder)("def f(x)")["input_ids"]
    command = [sys.executable, "-c", LOGITS.replace("IDS", str(tokens)), *map(str, expected)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path / "old")}, check=True)
    for path, logits in expected.items():
        assert_close(torch.load(path / "logits.pt"), logits, 1e-5, path.name)
