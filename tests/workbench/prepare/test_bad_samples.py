"""Records that cannot become samples: each is reported with its file and number."""

from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import PreTrainedTokenizerFast

from conformance.fuzz.chat_templates import CHATML, FORGETFUL, NO_TURNS, QUESTIONS_MARKED, STRICT
from conformance.oracle import make_config, tiny_llama
from picotron.console import UserError
from tests.support.samples import (
    CHAT,
    PROMPTS,
    config_of,
    encode,
    messages,
    with_template,
    write_jsonl,
)
from workbench.prepare.tokens import write_tokens

GOOD = {"q": "a", "a": "b", "chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


EMPTY = {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}


@pytest.mark.parametrize(
    ("bad", "template", "keys", "message"),
    [
        ({"q": "a"}, None, {}, r"completion_column='a' has no text there; use one of \['q'\]"),
        ({"q": "a", "a": None}, None, {}, "completion_column='a' is null there"),
        ([1], None, {}, "found a list"),
        ({"q": "\ud800", "a": "b"}, None, {}, "unpaired surrogate"),
        ({"chat": [{"role": "user", "content": 3}]}, CHATML, CHAT, "should have a list of messages"),
        ({"chat": messages([("user", "a")])}, CHATML, CHAT, "no message has the role 'assistant'"),
        ({"chat": messages([("user", "a"), ("assistant", "\ud800")])}, CHATML, CHAT, "unpaired surrogate"),
        (
            {"chat": messages([("user", "a"), ("assistant", "a")])},
            STRICT,
            CHAT,
            "the chat template fails .*must alternate",
        ),
        (
            {"chat": messages([("user", "a"), ("assistant", "b")] * 2)},
            FORGETFUL,
            CHAT,
            "changes the text before message 4",
        ),
        (EMPTY, QUESTIONS_MARKED.replace(".{% end", "{% end"), CHAT, "marks no text with"),
        (EMPTY, NO_TURNS, CHAT, "adds no text for the assistant"),
        ({"chat": [{"role": "assistant", "content": "a"}]}, CHATML, CHAT, "message 1 is the assistant's"),
        (GOOD | {"tools": [3]}, CHATML, CHAT, "column 'tools' should have a list"),
        (GOOD | {"tools": "[{"}, CHATML, CHAT, "column 'tools' is not valid JSON"),
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
        ("a.txt", CHAT, r"messages_column='chat', but .*a\.txt has no columns"),
        ("a.txt", {"dataset__text_column": "body"}, r"text_column='body', but .*a\.txt has no columns"),
        ("a.jsonl", CHAT, "messages_column='chat' needs a chat template"),
        ("a.jsonl", {"model__tokenizer": "bpe", **CHAT}, "which model.tokenizer='bpe' has not"),
    ],
)
def test_data_without_columns_or_templates_are_rejected(
    tmp_path: Path, folder: str, name: str, keys: dict[str, str], message: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(UserError, match=message):
        encode(make_config(**{"model__tokenizer": folder, "dataset__name": str(tmp_path / name)} | keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (PROMPTS, "no end-of-sequence token, which ends a completion"),
        ({"dataset__text_column": "a", "dataset__mask_documents": True}, "mask_documents=true, but the tokenizer"),
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
