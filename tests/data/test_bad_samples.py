"""Records that cannot become samples: each is reported with its file and number."""

from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import PreTrainedTokenizerFast

from conformance.fuzz.chat_templates import CHATML, FORGETFUL, NO_TURNS, QUESTIONS_MARKED, STRICT
from conformance.oracle import make_config, tiny_llama
from picotron.console import UserError
from picotron.data.tokens import write_tokens
from tests.support.samples import (
    CHAT,
    PROMPTS,
    config_of,
    encode,
    messages,
    with_template,
    write_jsonl,
)

GOOD = {"q": "a", "a": "b", "chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("bad", "template", "keys", "message"),
    [
        ({"q": "a"}, None, {}, r"dataset\.completion_column='a' has no text there; use one of \['q'\]"),
        ({"q": "a", "a": None}, None, {}, r"dataset\.completion_column='a' is null there; remove the record"),
        ([1], None, {}, r"expected an object \{\.\.\.\}, but found a list"),
        ({"q": "\ud800", "a": "b"}, None, {}, r"the text has an unpaired surrogate"),
        ({"chat": [{"role": "user", "content": 3}]}, CHATML, CHAT, r"should have a list of messages there"),
        ({"chat": messages([("user", "a")])}, CHATML, CHAT, r"no message has the role 'assistant'"),
        ({"chat": messages([("user", "a"), ("assistant", "\ud800")])}, CHATML, CHAT, r"unpaired surrogate"),
        (
            GOOD | {"chat": messages([("user", "a"), ("assistant", "a")])},
            STRICT,
            CHAT,
            r"the chat template fails .*: .*must alternate",
        ),
        (
            {"chat": messages([("user", "a"), ("assistant", "b")] * 2)},
            FORGETFUL,
            CHAT,
            r"the chat template changes the text before message 4 when it adds that message, .*; mark them in the template",
        ),
        (
            GOOD | {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            QUESTIONS_MARKED.replace(".{% end", "{% end"),
            CHAT,
            r"the chat template marks no text with \{% generation %\} in this conversation, .*; correct the",
        ),
        (
            GOOD | {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            NO_TURNS,
            CHAT,
            r"the chat template adds no text for the assistant in this conversation",
        ),
        (
            GOOD | {"chat": [{"role": "assistant", "content": "a"}]},
            CHATML,
            CHAT,
            r"message 1 is the assistant's, and the chat template does not show where that turn begins; mark .*, or remove",
        ),
        (
            GOOD | {"tools": [3]},
            CHATML,
            CHAT,
            r"the column 'tools' should have a list of JSON schemas there, or nothing; rename",
        ),
        (GOOD | {"tools": "[{"}, CHATML, CHAT, r"the text in column 'tools' is not valid JSON"),
    ],
)
def test_bad_records_are_reported_with_their_place(
    tmp_path: Path, folder: str, bad: Any, template: str | None, keys: dict[str, str], message: str
) -> None:
    if template:
        with_template(folder, template)
    good = [] if template == STRICT else [GOOD] * 2
    name = write_jsonl(tmp_path / "a.jsonl", [*good, bad])
    with pytest.raises(UserError, match=rf"a\.jsonl, line {len(good) + 1}: .*{message}") as error:
        encode(config_of(name, folder, **keys))
    assert len(str(error.value).splitlines()) == 1


def test_bad_rows_of_parquet_files_are_reported_with_their_number(tmp_path: Path, folder: str) -> None:
    frame = pandas.DataFrame([{"q": "a", "a": "b", "chat": GOOD["chat"]}] * 5)
    frame.loc[3, "a"] = None
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(UserError, match=r"a\.parquet, row 4: dataset\.completion_column='a' is null there"):
        encode(config_of(str(tmp_path / "a.parquet"), folder))
    frame["chat"] = "not a list"
    frame.to_parquet(tmp_path / "a.parquet")
    with_template(folder, CHATML)
    with pytest.raises(UserError, match=r"a\.parquet, row 1: dataset\.messages_column='chat' should have a list"):
        encode(config_of(str(tmp_path / "a.parquet"), folder, **CHAT))
    with pytest.raises(UserError, match=r"messages_column='talk': .*a\.parquet has no such column; use one of"):
        encode(config_of(str(tmp_path / "a.parquet"), folder, dataset__messages_column="talk"))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "a.txt",
            CHAT,
            r"dataset\.messages_column='chat', but .*a\.txt has no columns; use \.jsonl, \.json, \.csv or \.parquet files",
        ),
        (
            "a.txt",
            {"dataset__text_column": "body"},
            r"dataset\.text_column='body', but .*a\.txt has no columns; remove it",
        ),
        ("a.jsonl", CHAT, r"messages_column='chat' needs a chat template, but the tokenizer has none; choose another"),
        (
            "a.jsonl",
            {"model__tokenizer": "bpe", **CHAT},
            r"messages_column='chat' needs a tokenizer with a chat template, which model\.tokenizer='bpe' has not; choose",
        ),
    ],
)
def test_data_without_columns_or_templates_are_rejected(
    tmp_path: Path, folder: str, name: str, keys: dict[str, str], message: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "a.jsonl", [GOOD])
    name = name if name == "python-stdlib" else str(tmp_path / name)
    columns = keys or PROMPTS
    with pytest.raises(UserError, match=message) as error:
        encode(make_config(**{"model__tokenizer": folder, "dataset__name": name} | columns))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            PROMPTS,
            r"the tokenizer has no end-of-sequence token, which ends a completion; choose another model\.tokenizer",
        ),
        (
            {"dataset__text_column": "a", "dataset__mask_documents": True},
            r"mask_documents=true, but the tokenizer has no end-of-sequence token, which ends documents; set it to false",
        ),
    ],
)
def test_a_tokenizer_without_an_end_of_sequence_token_is_rejected(
    tmp_path: Path, folder: str, keys: dict[str, Any], message: str
) -> None:
    bpe = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(tmp_path / "endless")
    name = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(UserError, match=message):
        write_tokens(config_of(name, str(tmp_path / "endless"), **keys), tiny_llama(vocab_size=300))
