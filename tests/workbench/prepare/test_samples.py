"""Tokens and masks of samples, and of long documents: those that the tokenizer gives for the whole text."""

import bisect
import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
from transformers import AutoTokenizer

from picotron.console import UserError
from tests.fuzz.chat_templates import CHATML, LLAMA3, MARKED, TOOLS
from tests.fuzz.tokenizer_kinds import KINDS, make_tokenizer
from tests.support.oracle import make_config, tiny_llama
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
from workbench.prepare import text as text_module
from workbench.prepare.tokens import BATCH_ITEMS, write_tokens

# ------------------------------------------------------------------------------------------- prompts and completions

CHAT_OF_TWO = messages([("user", "What is 2 + 2?"), ("assistant", "It is 4.")])


@pytest.mark.processes
def test_number_of_tokenising_processes_does_not_change_the_samples(tmp_path: Path, folder: str) -> None:
    records = [{"q": "x" * (i % 50), "a": "it is 4. " * (i % 70)} for i in range(2 * BATCH_ITEMS + 1)]
    name = write_jsonl(tmp_path / "a.jsonl", records)
    one = encode(config_of(name, folder, **PROMPTS))
    assert len(one.lengths) == len(records)
    Path(name).touch()  # so the tokens are not taken from the cache
    two = encode(config_of(name, folder, **PROMPTS, dataset__num_proc=2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_other_columns_and_other_templates_are_tokenised_again(tmp_path: Path, folder: str) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "a": "b", "chat": CHAT_OF_TWO}])
    other = with_template(str(shutil.copytree(folder, tmp_path / "other")), LLAMA3)
    keys = [PROMPTS, {"dataset__text_column": "a"}, {"dataset__prompt_column": "a", "dataset__completion_column": "q"}]
    configs = [config_of(name, folder, **each) for each in keys]
    configs += [config_of(name, tokenizer, **CHAT) for tokenizer in (with_template(folder, CHATML), other)]
    assert len({write_tokens(config, tiny_llama(vocab_size=300)) for config in configs}) == 5


# ------------------------------------------------------------------------------------------------------ conversations


@pytest.mark.parametrize(
    ("template", "kind"), [(CHATML, "jsonl"), (MARKED["ChatML"], "json text"), (CHATML, "parquet")], ids=repr
)
def test_the_template_gets_the_tools_of_a_record(tmp_path: Path, folder: str, template: str, kind: str) -> None:
    """In a table, all objects have the same keys: those that a record lacks are null there."""
    with_template(folder, TOOLS + template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tools = [
        [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}],
        None,
        [
            {"type": "function", "function": {"name": "see"}},
            {"type": "function", "function": {"name": "f", "parameters": {"b": "str"}}},
        ],
    ]
    given = map(json.dumps, tools) if kind == "json text" else tools
    records = [{"chat": CHAT_OF_TWO, "other": "x", "tools": each} for each in given]
    name = write_jsonl(tmp_path / "a.jsonl", records)
    if kind == "parquet":
        pandas.DataFrame(records).to_parquet(name := str(tmp_path / "a.parquet"))
    samples = split(encode(config_of(name, folder, **CHAT)))
    for each, (tokens, _) in zip(tools, samples, strict=True):
        assert tokens == tokenizer.apply_chat_template(CHAT_OF_TWO, each, return_dict=True)["input_ids"]
        assert ("parameters" in tokenizer.decode(tokens)) == (each is not None)


VOCABULARY = 480


def test_a_slow_tokenizer_must_tell_where_a_completion_begins(tmp_path: Path, folder: str) -> None:
    """ByT5 drops white space before </s>."""
    make_tokenizer("ByT5", VOCABULARY).save_pretrained(tmp_path / "slow")
    name = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "a": "b"}, {"q": "What?\n", "a": "</s>b"}])
    message = r"cannot begin or end at '</s>b' after 'What\?\\n'; choose a model\.tokenizer with a tokenizer\.json"
    with pytest.raises(UserError, match=message):
        encode(config_of(name, str(tmp_path / "slow")), VOCABULARY)


# ------------------------------------------------------------------------------------------------------ long documents

PROSE = "The quick brown fox, it jumps over 12 lazy dogs; naïve as Žluťoučký kůň. "
DOCUMENT = (
    inspect.getsource(bisect)
    + PROSE * 50
    + f"{PROSE * 3}\n\n{PROSE}  \n\t{PROSE}\n" * 10
    + "日本語のテキスト。私は学生です、" * 150
    + "one</s>\n two <s> three</s>" * 100
)
EMOJI = "🙂👍🏽e\u0301" * 500  # a single word, for which WordPiece has a single token


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_long_document_are_those_of_its_whole_text(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(text_module, "PIECE", 2**10)
    monkeypatch.setattr(text_module, "WINDOW", 2**9)
    assert text_module.CONTEXT <= text_module.PIECE
    make_tokenizer(kind, VOCABULARY).save_pretrained(other := tmp_path / "other")
    tokenizer, text = AutoTokenizer.from_pretrained(other), DOCUMENT if kind == "WordPiece" else DOCUMENT + EMOJI
    name = write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    config = make_config(dataset__name=name, model__tokenizer=str(other))
    tokens = np.fromfile(write_tokens(config, tiny_llama(vocab_size=VOCABULARY)) / "tokens.uint16", np.uint16)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = [token for token in tokenizer(text)["input_ids"][:1] if token == tokenizer.bos_token_id]
    assert tokens.tolist() == [*start, *whole, tokenizer.eos_token_id]
