"""Conversations in the shapes that people have, and what their chat templates hide: random ones are in the fuzzer."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import AutoTokenizer

from conformance.fuzz.chat_templates import CHATML, TEMPLATES
from picotron.console import UserError
from tests.support.samples import CHAT, PROMPTS, config_of, encode, split, with_template, write_jsonl

USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
END_OUTSIDE = """{%- for message in messages -%}{{ message['role'] + ': ' }}
{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] }}{% endgeneration %}
{%- else -%}{{ message['content'] }}{%- endif -%}{{ '<|im_end|>' }}{%- endfor -%}"""
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def counted(name: str, folder: str, **keys: Any) -> list[str]:
    """Return the text of each sample, with the tokens that the loss counts in [[ ]]."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for tokens, mask in split(encode(config_of(name, folder, **keys or CHAT))):
        text, inside = "", 0
        for token, count in zip([*tokens, None], [*mask, 0], strict=True):
            text += ("[[" if count > inside else "]]" if count < inside else "") + (
                tokenizer.decode(token) if token is not None else ""
            )
            inside = count
        found.append(text)
    return found


def test_keys_that_the_template_ignores_are_named_once(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    reasoning = CHATML.replace(
        "{{- message['content'] +", "{{- (message['reasoning_content'] or '') + message['content'] +"
    )
    with_template(folder, reasoning)
    records: list[Any] = [
        [USER, ANSWER | {"reasoning_content": "R", "name": "me"}],
        [USER, ANSWER | {"content": "", "tool_calls": CALL}, {"role": "tool", "content": "7"}, ANSWER],
        [USER, ANSWER | {"tool_calls": None}],
    ]
    chats = [{"chat": messages} for messages in records]
    chats[2]["tools"] = CALL
    counted(write_jsonl(tmp_path / "a.jsonl", chats), folder)
    lines = sorted(record.getMessage() for record in caplog.records if "ignores" in record.getMessage())
    assert lines == [
        f"the chat template ignores {key!r} in 1 of 3 conversations" for key in ("name", "tool_calls", "tools")
    ]


@pytest.mark.parametrize(
    ("template", "text", "warning"),
    [
        (CHATML, "[[A<|im_end|>\n]]", None),
        (TEMPLATES["Next"], "[[A<|endoftext|>]]", "shows no end of the assistant's turn"),
        (TEMPLATES["Separator"], "[[A<|endoftext|>]]", "shows no end of the assistant's turn"),
        (END_OUTSIDE, "[[A]]<|im_end|>", "does not mark the end of the assistant's turn"),
    ],
)
def test_a_turn_without_an_end_is_ended_or_named(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture, template: str, text: str, warning: str | None
) -> None:
    with_template(folder, template)
    (found,) = counted(write_jsonl(tmp_path / "a.jsonl", [{"chat": [USER, ANSWER]}]), folder)
    assert found.endswith(text)
    lines = [record.getMessage() for record in caplog.records if "'s turn" in record.getMessage()]
    assert [warning in line and "QUESTION" in line for line in lines] == [True] if warning else not lines


def test_messages_of_tables_and_of_prompts_are_conversations(tmp_path: Path, folder: str) -> None:
    with_template(folder, CHATML)
    pairs = {"q": [USER, ANSWER, USER], "a": [ANSWER]}
    chats = {
        "role": [*pairs["q"][:1], ANSWER],
        "from": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
    }
    expected = ["<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]"]
    for name, messages in chats.items():
        for value in (messages, json.dumps(messages)):
            file = tmp_path / f"{name}{type(value).__name__}.parquet"
            pandas.DataFrame([{"chat": value, "weight": 1.0, "other": 5}]).to_parquet(file)
            assert counted(str(file), folder) == expected
    pandas.DataFrame([pairs]).to_parquet(tmp_path / "pairs.parquet")
    turn = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert counted(str(tmp_path / "pairs.parquet"), folder, **PROMPTS) == [
        f"{turn}A<|im_end|>\n{turn}[[A<|im_end|>\n]]"
    ]


def test_records_of_weight_0_are_left_out(tmp_path: Path, folder: str) -> None:
    with_template(folder, CHATML)
    records = [{"chat": [USER, ANSWER | {"content": str(i)}], "weight": i % 2} for i in range(4)]
    records.append({"chat": [USER, ANSWER | {"train": False}], "weight": 1})
    found = counted(write_jsonl(tmp_path / "a.jsonl", records), folder)
    assert [text.partition("[[")[2][0] for text in found] == ["1", "3"]


@pytest.mark.parametrize(
    ("record", "keys", "message"),
    [
        ({"chat": [USER, ANSWER | {"weight": 0.5}]}, CHAT, "weight=0.5 should be 0 or 1"),
        ({"chat": [USER, ANSWER], "weight": 2.5}, CHAT, "weight=2.5 should be 0 or 1"),
        ({"chat": [{"from": "human"}]}, CHAT, "should have a list of messages there"),
        ({"q": [USER], "a": "A"}, PROMPTS, "columns q and a should have two texts, or two lists of messages"),
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            {"dataset__prompt_column": "instruction", "dataset__completion_column": "output"},
            "also has the column 'input', which prompt_column='instruction' leaves out",
        ),
    ],
)
def test_shapes_that_would_be_half_read_are_refused(
    tmp_path: Path, folder: str, record: Any, keys: dict[str, Any], message: str
) -> None:
    with_template(folder, CHATML)
    name = write_jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(UserError, match=message):
        encode(config_of(name, folder, **keys))
    if "input" in record:
        pandas.DataFrame([record]).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(UserError, match=message):
            encode(config_of(str(tmp_path / "a.parquet"), folder, **keys))


def test_a_template_that_computes_the_format_of_the_date_is_refused(tmp_path: Path, folder: str) -> None:
    with_template(folder, "{%- set form = '%d' -%}{{ strftime_now(form) }}" + CHATML)
    name = write_jsonl(tmp_path / "a.jsonl", [{"chat": [USER, ANSWER]}])
    with pytest.raises(UserError, match="prints the date in a format that it computes"):
        encode(config_of(name, folder, **CHAT))
