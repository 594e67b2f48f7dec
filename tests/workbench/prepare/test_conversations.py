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


def test_what_is_not_in_the_text_or_not_counted_is_named_once(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A template that knows two roles and one key, cuts reasoning from earlier turns, and counts the answer alone."""
    template = """{%- for m in messages -%}{%- if m.role == 'user' -%}{{ 'Q' + m.content + '\n' }}
{%- elif m.role == 'assistant' -%}{{ 'A' }}{%- if m.reasoning and loop.last -%}{{ m.reasoning }}{%- endif -%}
{%- generation -%}{{ m.content + '\n' }}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"""
    with_template(folder, template)
    chats: list[Any] = [
        {"chat": [USER, ANSWER | {"reasoning": "R", "name": "me"}, USER, ANSWER | {"reasoning": "R"}]},
        {"chat": [USER, ANSWER | {"tool_calls": CALL}, {"role": "tool", "content": "7", "name": "f"}, ANSWER]},
        {"chat": [USER, ANSWER | {"tool_calls": None}], "tools": CALL, "system": "S"},
    ]
    counted(write_jsonl(tmp_path / "a.jsonl", chats), folder)
    start = "the chat template ignores "
    lines = sorted(record.getMessage() for record in caplog.records if " conversations" in record.getMessage())
    ignored = ["'name'", "'reasoning'", "'tool_calls'", "'tools'"]
    ignored += [f"the content of messages with the role {role!r}" for role in ("system", "tool")]
    assert lines == [
        *(f"{start}{name} in 1 of 3 conversations" for name in ignored),
        "the loss does not count 'reasoning' of the assistant in 1 of 3 conversations",
    ]


TOOL_TEMPLATE = CHATML.replace(
    "{{- message['content'] +", "{{- message['content'] + CALLS if message.tool_calls else message['content'] +"
)
FORMS = {  # how templates print the arguments of a call
    "objects": "(message.tool_calls[0].function.arguments | tojson)",
    "items": "message.tool_calls[0].function.arguments.items() | list | tojson",
    "texts": "message.tool_calls[0].function.arguments",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
def test_arguments_are_what_the_template_expects(
    tmp_path: Path, folder: str, form: str, content: dict[str, Any]
) -> None:
    """Objects, or JSON texts as OpenAI writes them; beside a content that may be missing."""
    with_template(folder, TOOL_TEMPLATE.replace("CALLS", f"({FORMS[form]}) + '<|im_end|>'"))
    chats = []
    for arguments in ({"x": 1}, '{"x": 1}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        chats.append({"chat": [USER, {"role": "assistant", "tool_calls": [call]} | content]})
    first, second = counted(write_jsonl(tmp_path / "a.jsonl", chats), folder)
    assert first == second
    assert ('[["x", 1]]' if form == "items" else '{"x": 1}') in first.partition("[[")[2]


def test_messages_of_sharegpt_are_those_of_the_template(tmp_path: Path, folder: str) -> None:
    with_template(folder, TOOL_TEMPLATE.replace("CALLS", f"({FORMS['objects']})"))
    words = {"human": "Q", "function_call": '{"name": "f", "arguments": {"x": 1}}', "observation": "7", "bing": "A"}
    chat = [{"from": role, "value": value} for role, value in words.items()]
    (found,) = counted(write_jsonl(tmp_path / "a.jsonl", [{"chat": chat, "system": "S"}]), folder)
    parts = ["system\nS", "user\nQ", 'assistant\n[[{"x": 1}', "tool\n7", "assistant\n[[A"]
    assert [part for part in parts if part not in found] == []


def test_contents_of_parts_are_texts(tmp_path: Path, folder: str) -> None:
    with_template(folder, CHATML)
    parts = [{"type": "text", "text": "Q"}, {"type": "text", "text": "R"}]
    name = write_jsonl(tmp_path / "a.jsonl", [{"chat": [{"role": "user", "content": parts}, ANSWER]}])
    assert "user\nQ\nR<|im_end|>" in counted(name, folder)[0]
    parts.append({"type": "image_url", "image_url": {"url": "x"}})  # type: ignore[dict-item]
    name = write_jsonl(tmp_path / "b.jsonl", [{"chat": [{"role": "user", "content": parts}, ANSWER]}])
    with pytest.raises(UserError, match="such as an image"):
        encode(config_of(name, folder, **CHAT))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_records_that_cannot_be_used_are_left_out_if_the_user_says_so(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    with_template(folder, CHATML)
    records = [{"chat": [USER, ANSWER | {"content": str(i)}] if i % 3 else [ANSWER]} for i in range(20)]
    name = write_jsonl(tmp_path / "a.jsonl", records)
    keys = CHAT | {"dataset__num_proc": processes}
    with pytest.raises(UserError, match="7 of 20 records that were read cannot be used"):
        encode(config_of(name, folder, **keys))
    found = counted(name, folder, **keys, dataset__skip_invalid=True)
    assert [int(text.partition("[[")[2].partition("<")[0]) for text in found] == [i for i in range(20) if i % 3]
    assert "7 of 20 records cannot be used, and are left out; the first: " in caplog.text


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
        ({"chat": [USER, ANSWER], "weight": 2}, CHAT, "weight=2 should be 0 or 1"),
        ({"chat": [{"from": "human"}]}, CHAT, "should have a list of messages there"),
        (
            {"chat": [{"role": "system", "content": "s"}, USER, ANSWER], "system": "s"},
            CHAT,
            "no message of that role beside",
        ),
        ({"q": [USER], "a": "A"}, PROMPTS, "columns q and a should have two texts, or two lists of messages"),
        *(
            (
                {"instruction": "Add", key: "1 2", "output": "3"},
                {"dataset__prompt_column": "instruction", "dataset__completion_column": "output"},
                f"also has the column {key!r}, which prompt_column='instruction' leaves out",
            )
            for key in ("input", "history", "system")
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
    if "instruction" in record:
        pandas.DataFrame([record]).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(UserError, match=message):
            encode(config_of(str(tmp_path / "a.parquet"), folder, **keys))


def test_a_template_that_computes_the_format_of_the_date_is_refused(tmp_path: Path, folder: str) -> None:
    with_template(folder, "{%- set form = '%d' -%}{{ strftime_now(form) }}" + CHATML)
    name = write_jsonl(tmp_path / "a.jsonl", [{"chat": [USER, ANSWER]}])
    with pytest.raises(UserError, match="prints the date in a format that it computes"):
        encode(config_of(name, folder, **CHAT))
