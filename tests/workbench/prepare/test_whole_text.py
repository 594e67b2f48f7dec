"""Tokens of samples and of long documents: those that the tokenizer gives for the whole text."""

import bisect
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conformance.fuzz.tokenizer_kinds import KINDS, make_tokenizer
from picotron.console import UserError
from tests.support.oracle import make_config, tiny_llama
from tests.support.samples import config_of, encode, write_jsonl
from workbench.prepare import text as text_module
from workbench.prepare.tokens import write_tokens

VOCABULARY = 480


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(folder: Path, kind: str) -> tuple[PreTrainedTokenizerBase, str]:
    """Save a tokenizer, and return the one that is loaded from there."""
    tokenizer = make_tokenizer(kind, VOCABULARY)
    tokenizer.save_pretrained(folder / "tokenizer")
    return AutoTokenizer.from_pretrained(folder / "tokenizer"), str(folder / "tokenizer")


def test_a_slow_tokenizer_must_tell_where_a_completion_begins(tmp_path: Path) -> None:
    """ByT5 drops white space before </s>."""
    _, folder = saved(tmp_path, "ByT5")
    name = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "a": "b"}, {"q": "What?\n", "a": "</s>b"}])
    message = r"cannot begin or end at '</s>b' after 'What\?\\n'; choose a model\.tokenizer with a tokenizer\.json"
    with pytest.raises(UserError, match=message):
        encode(config_of(name, folder), VOCABULARY)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(text_module, "PIECE", 2**10)
    monkeypatch.setattr(text_module, "WINDOW", 2**9)
    assert text_module.CONTEXT <= text_module.PIECE
    tokenizer, folder = saved(tmp_path, kind)
    file, text = tmp_path / "a.jsonl", DOCUMENT if kind == "WordPiece" else DOCUMENT + EMOJI
    file.write_text(json.dumps({"text": text}))
    config = make_config(dataset__name=str(file), model__tokenizer=folder)
    tokens = np.fromfile(write_tokens(config, tiny_llama(vocab_size=VOCABULARY)) / "tokens.uint16", np.uint16)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = [token for token in tokenizer(text)["input_ids"][:1] if token == tokenizer.bos_token_id]
    assert tokens.tolist() == [*start, *whole, tokenizer.eos_token_id]
