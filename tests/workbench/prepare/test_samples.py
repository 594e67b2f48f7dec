"""Samples for fine-tuning: tokens and masks of prompts, completions and conversations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from transformers import AutoTokenizer

from conformance.fuzz.chat_templates import CHATML, LLAMA3, MARKED, TOOLS
from picotron.console import UserError
from tests.support.oracle import tiny_llama
from tests.support.samples import (
    CHAT,
    PROMPTS,
    config_of,
    encode,
    messages,
    split,
    with_template,
    write_jsonl,
)
from workbench.prepare.tokens import BATCH_ITEMS, write_tokens

# ------------------------------------------------------------------------------------------- prompts and completions

PAIRS = [("What is 2 + 2?", " It is 4."), ("", "def f(x):"), ("x", ""), ("wide 日本語 🙂", "\nreturn x\n")]


def write_pairs(folder: Path) -> str:
    return write_jsonl(folder / "pairs.jsonl", [{"n": i, "q": q, "a": a} for i, (q, a) in enumerate(PAIRS)])


@pytest.mark.processes
def test_number_of_tokenising_processes_does_not_change_the_samples(tmp_path: Path, folder: str) -> None:
    records = [{"q": "x" * (i % 50), "a": "it is 4. " * (i % 70)} for i in range(2 * BATCH_ITEMS + 1)]
    name = write_jsonl(tmp_path / "a.jsonl", records)
    one = encode(config_of(name, folder, **PROMPTS))
    assert len(one.lengths) == len(records)
    Path(name).touch()  # so the tokens are not taken from the cache
    two = encode(config_of(name, folder, **PROMPTS, dataset__num_proc=2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_samples_and_text_of_a_file_do_not_share_a_cache(tmp_path: Path, folder: str) -> None:
    name = write_pairs(tmp_path)
    configs = [
        config_of(name, folder),
        config_of(name, folder, dataset__text_column="a"),
        config_of(name, folder, dataset__prompt_column="a", dataset__completion_column="q"),
    ]
    for config in configs:
        write_tokens(config, tiny_llama(vocab_size=300))
    assert len([path for path in (tmp_path / "cache" / "picotron").glob("tokens-*") if path.is_dir()]) == 3


def test_rows_of_a_hub_data_set_become_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    import datasets

    columns = {"q": [q for q, _ in PAIRS], "a": [a for _, a in PAIRS], "chat": [messages(CHATS[0])] * 4, "n": [1] * 4}
    rows = datasets.Dataset.from_dict(columns)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows)
    monkeypatch.setattr("workbench.prepare.documents.connect", lambda name: None)
    assert split(encode(config_of("somebody/data", folder))) == split(encode(config_of(write_pairs(tmp_path), folder)))
    with_template(folder, CHATML)
    assert len(encode(config_of("somebody/data", folder, **CHAT)).lengths) == 4
    with pytest.raises(
        UserError,
        match=r"completion_column='n': somebody/data has no text there, but the type int64; use one of \['q', 'a'\]",
    ):
        encode(config_of("somebody/data", folder, dataset__prompt_column="q", dataset__completion_column="n"))


# ------------------------------------------------------------------------------------------------------ conversations

CHATS = [
    [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    [("system", "Be brief."), ("user", "x"), ("assistant", "1"), ("user", "y"), ("assistant", "2 🙂"), ("user", "bye")],
]


@pytest.mark.parametrize(
    ("template", "kind"), [(CHATML, "jsonl"), (MARKED["ChatML"], "json text"), (CHATML, "parquet")], ids=repr
)
def test_the_template_gets_the_tools_of_a_record(tmp_path: Path, folder: str, template: str, kind: str) -> None:
    """In a table, all objects have the same keys: those that a record lacks are null there."""
    with_template(folder, TOOLS + template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tools: list[Any] = [
        [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}],
        None,
        [
            {"type": "function", "function": {"name": "see"}},
            {"type": "function", "function": {"name": "f", "parameters": {"b": "str"}}},
        ],
    ]
    records = [{"chat": messages(CHATS[0]), "other": "x", "tools": each} for each in tools]
    if kind == "json text":
        records = [record | {"tools": json.dumps(record["tools"])} for record in records]
    name = str(tmp_path / f"a.{kind.replace(' text', 'l')}")
    if kind == "parquet":
        pandas.DataFrame(records).to_parquet(name)
    else:
        write_jsonl(Path(name), records)
    samples = split(encode(config_of(name, folder, **CHAT)))
    for each, (tokens, _) in zip(tools, samples, strict=True):
        assert tokens == tokenizer.apply_chat_template(messages(CHATS[0]), each, return_dict=True)["input_ids"]
        assert ("parameters" in tokenizer.decode(tokens)) == (each is not None)


def test_conversations_with_another_template_are_tokenised_again(tmp_path: Path, folder: str) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"chat": messages(CHATS[0])}])
    lengths = [
        encode(config_of(name, with_template(folder, template), **CHAT)).lengths.tolist()
        for template in (CHATML, LLAMA3)
    ]
    assert lengths[0] != lengths[1]
