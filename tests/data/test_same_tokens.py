"""Tokens of a set of files, which no change of the readers may change."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from conformance.fuzz.chat_templates import CHATML
from conformance.oracle import make_config, tiny_llama
from picotron.data.tokens import read_arrays, write_tokens
from tests.support.samples import CHAT, PROMPTS, messages, with_template

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "",
    "naïve 日本語 🙂 e\u0301 \u2028 \x85 \x0b \ufeff \x00",
    "carriage\r\nreturns\rof all\n\nkinds\r\n",
    *("2020-01-01", "2020-01-01T10:00:00", "007", "1.10", "NA", "null"),  # which some readers convert
    "  white space \t\n",
    "a long document of words, naïve as 日本語\r\n" * 2_200,
    "</s> <|endoftext|> <s>",
]
CHATS = [
    messages([("system", "Be brief."), ("user", "2020-01-01"), ("assistant", "007")]),
    messages([("user", "🙂"), ("assistant", " a\r\nb "), ("user", "x"), ("assistant", "ü"), ("user", "bye")]),
]


def lines(records: list[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(record, ensure_ascii=i % 2 == 0) + end for i, record in enumerate(records)).encode()


def write_files(folder: Path) -> None:
    documents: list[Any] = [{"text": text, "n": i} for i, text in enumerate(TEXTS)]
    documents[5:5] = [{"text": None, "n": None}, {"more": [1], "text": "x"}]
    samples = [{"q": q, "a": a, "n": 1} for q, a in zip(TEXTS, reversed(TEXTS), strict=True)]
    chats = [{"chat": chat, "tools": tools} for chat, tools in zip(CHATS, (None, [{"name": "f"}]), strict=True)]
    contents = {
        "lines.jsonl": lines(documents),
        "returns.jsonl": b"\r\n" + lines(documents, "\r\n\r\n"),
        "marked.jsonl": b"\xef\xbb\xbf" + lines(documents)[:-1],
        "array.json": b" \n" + json.dumps(documents, indent=1).encode(),
        "lines.json": lines(documents),
        "samples.jsonl": lines(samples),
        "samples.json": json.dumps(samples).encode(),
        "chats.jsonl": lines(chats),
        "one.txt": "".join(TEXTS).encode(),
        "marked.txt": b"\xef\xbb\xbf" + "".join(TEXTS).encode(),
        "many.txt/empty.txt": b"",
        "many.txt/returns.txt": b"\r\na\r\r\n",
        "many.txt/mark.txt": b"\xef\xbb\xbf",
        "many.txt/deep/long.txt": "wide 日本語, word".encode() * 5_000,
        "many.txt/\u00fc.txt": b"end",
        "many.jsonl/a.jsonl": lines(documents[:4]),
        "many.jsonl/b.jsonl": b"",
        "many.jsonl/c.jsonl": lines(documents[4:]),
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, records in (("a.parquet", documents), ("samples.parquet", samples), ("chats.parquet", chats)):
        pandas.DataFrame(records).to_parquet(folder / name, row_group_size=5)


TOKENS = {  # hashes of the arrays of all documents, and of the first 7
    "lines.jsonl": ("01d8f1e188843916", "c9b59d079ade7857"),
    "returns.jsonl": ("01d8f1e188843916", "c9b59d079ade7857"),
    "marked.jsonl": ("01d8f1e188843916", "c9b59d079ade7857"),
    "array.json": ("01d8f1e188843916", "c9b59d079ade7857"),
    "lines.json": ("01d8f1e188843916", "c9b59d079ade7857"),
    "a.parquet": ("01d8f1e188843916", "c9b59d079ade7857"),
    "one.txt": ("b760d62970203414", "b760d62970203414"),
    "marked.txt": ("b760d62970203414", "b760d62970203414"),
    "many.txt": ("e1a07c8368e770fa", "e1a07c8368e770fa"),
    "many.jsonl": ("01d8f1e188843916", "c9b59d079ade7857"),
    "samples.jsonl": ("e43feaa388e43bea", "2649ccfba2e99f1f"),
    "samples.json": ("e43feaa388e43bea", "2649ccfba2e99f1f"),
    "samples.parquet": ("e43feaa388e43bea", "2649ccfba2e99f1f"),
    "chats.jsonl": ("3755afcb1998d70b", "3755afcb1998d70b"),
    "chats.parquet": ("3755afcb1998d70b", "3755afcb1998d70b"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_the_tokens_of_a_file_do_not_change(tmp_path: Path, folder: str, name: str) -> None:
    write_files(tmp_path / "data")
    with_template(folder, CHATML)
    keys = CHAT if name.startswith("chats") else PROMPTS if name.startswith("samples") else {}
    for limit in (None, 7):
        config = make_config(
            dataset__name=str(tmp_path / "data" / name), model__tokenizer=folder, training__num_samples=limit, **keys
        )
        data = read_arrays(config, write_tokens(config, tiny_llama(vocab_size=300)))
        arrays = [np.asarray(array).tobytes() for array in data if isinstance(array, np.ndarray)]
        assert hashlib.sha256(b" ".join(arrays)).hexdigest()[:16] == TOKENS[name][limit is not None]
