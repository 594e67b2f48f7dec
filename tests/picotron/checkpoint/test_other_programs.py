"""A checkpoint in programs that load Hugging Face model folders: transformers has the same text as generate.py."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import generate as program
from conformance.fuzz.chat_templates import CHATML
from conformance.fuzz.tokenizer_kinds import make_tokenizer
from conformance.oracle import tiny_llama
from conformance.worker_pool import WorkerPool
from tests.support.checkpoints import first_half, run

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
PROMPT, MESSAGES = "def f(x)", [{"role": "user", "content": "hello"}]


@pytest.mark.usefixtures("_end_process_group")
def test_transformers_generates_the_text_of_generate_py(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer("byte-level")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model_config = tiny_llama("qwen3", vocab_size=len(tokenizer), initializer_range=0.5, eos_token_id=7)
    run(pool, first_half(tmp_path / "run", {"pp_size": 2}), model_config, tmp_path / "tokenizer")

    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, [{"prompt": PROMPT}, {"messages": MESSAGES}])))
    words = ["--prompts", tmp_path / "p.jsonl", "--output", tmp_path / "o.jsonl", "--max_new_tokens", 20]
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(tmp_path / "run"), *map(str, words)])
    program.main()
    texts = [json.loads(line)["text"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(set(texts)) == 2

    folder = tmp_path / "run" / "step_00000005"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.dtype) == ("qwen3", torch.float64)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].size(1) :]
    assert tokenizer.decode(output, skip_special_tokens=True) == texts[0]
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].size(1) :]
    assert tokenizer.decode(output, skip_special_tokens=True) == texts[1]
