"""Data sets for fine-tuning in tests: files, and the samples made of them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from picotron.config import Config
from tests.support.oracle import make_config, tiny_llama
from workbench.prepare.tokens import train_bpe, write_tokens
from workbench.run.token_files import Samples, map_token_files

PROMPTS = {"dataset__prompt_column": "q", "dataset__completion_column": "a"}
CHAT = {"dataset__messages_column": "chat"}


def write_tokenizer(folder: Path) -> str:
    """Save a byte-level BPE of 300 tokens. Returns the name of the folder."""
    texts = ["def f(x):\n    return x + 1\n", "What is 2 + 2? It is 4. <|im_start|>user assistant system<|im_end|>\n"]
    train_bpe(iter(texts), 300).save_pretrained(folder)
    return str(folder)


def with_template(folder: str, template: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def config_of(name: str, tokenizer: str, **keys: Any) -> Config:
    """Return a config that reads prompts and completions, unless the keys say otherwise."""
    return make_config(dataset__name=name, model__tokenizer=tokenizer, **keys or PROMPTS)


def encode(config: Config, vocab_size: int = 300) -> Samples:
    """Tokenise the data set of a config, without a process group."""
    model_config = tiny_llama(vocab_size=vocab_size)
    data, _ = map_token_files(write_tokens(config, model_config), config, model_config)
    assert isinstance(data, Samples)
    assert isinstance(data.tokens, np.memmap)
    assert len(data.tokens) == len(data.counted) == data.lengths.sum()
    return data


def split(data: Samples) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the mask of each sample."""
    ends = data.lengths.cumsum()
    return [
        (data.tokens[end - n : end].tolist(), data.counted[end - n : end].tolist())
        for end, n in zip(ends, data.lengths, strict=True)
    ]


def marked(tokenizer: Any, tokens: list[int], mask: list[int]) -> str:
    """Return the text of a sample, with the tokens that the loss counts in [[ ]]."""
    found = ""
    for counts, group in itertools.groupby(zip(tokens, mask, strict=True), lambda each: each[1]):
        text = tokenizer.decode([token for token, _ in group])
        found += f"[[{text}]]" if counts else text
    return found


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]
