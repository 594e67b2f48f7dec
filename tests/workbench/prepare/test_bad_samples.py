"""Records that cannot become samples: each is reported with its file and number."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from conformance.fuzz.chat_templates import CHATML, COUNTING, QUESTIONS_MARKED, STRICT
from picotron.console import UserError
from tests.support.oracle import make_config, tiny_llama
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


OTHER_TURN = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ 'Assistant: ' }}")  # no answer begins so
EMPTY = {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}


@pytest.mark.parametrize(
    ("bad", "template", "keys", "message"),
    [
        ({"q": "a"}, None, {}, r"completion_column='a' has no text there; use one of \['q'\]"),
        ([1], None, {}, "found a list"),
        ({"q": "a", "a": "\udfff"}, None, {}, "unpaired surrogate"),
        ({"chat": messages([("user", "a")])}, CHATML, CHAT, "no message has the role 'assistant'"),
        (
            {"chat": messages([("user", "a"), ("assistant", "a")])},
            STRICT,
            CHAT,
            "the chat template fails .*must alternate",
        ),
        (
            {"chat": messages([("user", "a"), ("assistant", "b")])},
            COUNTING,
            CHAT,
            "changes the text before message 2",
        ),
        ({"chat": messages([("user", "a"), ("assistant", "b")])}, OTHER_TURN, CHAT, "turn cannot be told apart"),
        (EMPTY, QUESTIONS_MARKED.replace(".{% end", "{% end"), CHAT, "marks no text with"),
        ({"chat": [{"role": "assistant", "content": "a"}]}, CHATML, CHAT, "message 1 is the assistant's"),
        (GOOD | {"tools": [3]}, CHATML, CHAT, "column 'tools' should have a list"),
    ],
)
def test_bad_records_are_reported_with_their_place(
    tmp_path: Path, folder: str, bad: Any, template: str | None, keys: dict[str, str], message: str
) -> None:
    if template:
        with_template(folder, template)
    good = [] if template in (STRICT, COUNTING, OTHER_TURN) else [GOOD] * 2
    name = write_jsonl(tmp_path / "a.jsonl", [*good, bad])
    with pytest.raises(UserError, match=rf"a\.jsonl, line {len(good) + 1}: .*{message}") as error:
        encode(config_of(name, folder, **keys))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("a.txt", CHAT, r"messages_column='chat', but .*a\.txt has no columns"),
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


def test_a_tokenizer_without_an_end_of_sequence_token_is_rejected(tmp_path: Path, folder: str) -> None:
    bpe = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(tmp_path / "endless")
    name = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(UserError, match="no end-of-sequence token, which ends a completion"):
        write_tokens(config_of(name, str(tmp_path / "endless"), **PROMPTS), tiny_llama(vocab_size=300))
