"""Conversations and pairs in the shapes that people have: what becomes of them, and which records are refused. Random
ones are in the fuzzer.
"""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from picotron.config import Config
from picotron.console import UserError
from tests.fuzz.chat_templates import CHATML, COUNTING, MARKED, QUESTIONS_MARKED, STRICT, TEMPLATES, TOOLS
from tests.fuzz.tokenizer_kinds import make_tokenizer
from tests.support.oracle import make_config, tiny_llama
from tests.support.samples import CHAT, PROMPTS, config_of, encode, marked, messages, split, with_template, write_jsonl
from workbench.prepare.tokens import BATCH_ITEMS, write_tokens

USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
END_OUTSIDE = """{%- for message in messages -%}{{ message['role'] + ': ' }}
{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] }}{% endgeneration %}
{%- else -%}{{ message['content'] }}{%- endif -%}{{ '<|im_end|>' }}{%- endfor -%}"""
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def data_of(folder: str, template: str, records: list[Any], **keys: Any) -> Config:
    """Write records beside a tokenizer, which gets a chat template."""
    name = write_jsonl(Path(folder).parent / "a.jsonl", records)
    return config_of(name, with_template(folder, template), **keys or CHAT)


def counted(config: Config) -> list[str]:
    """Return the text of each sample, with the tokens that the loss counts in [[ ]]."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer)
    return [marked(tokenizer, *each) for each in split(encode(config))]


def test_what_is_not_in_the_text_or_not_counted_is_named_once(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """A template that knows two roles and one key, cuts reasoning from earlier turns, compares a number that it does
    not print, and counts the answer alone.
    """
    template = """{%- for m in messages -%}{%- if m.role == 'user' -%}{{ 'Q' + m.content + '\n' }}
{%- elif m.role == 'assistant' -%}{{ 'A' }}{%- if m.reasoning and loop.last -%}{{ m.reasoning }}{%- endif -%}
{%- if m.grade and m.grade > 10**30 -%}{{ '!' }}{%- endif -%}
{%- generation -%}{{ m.content + '\n' }}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"""
    chats = [
        {"chat": [USER, ANSWER | {"reasoning": "R", "name": "me"}, USER, ANSWER | {"reasoning": "R", "grade": 7}]},
        {"chat": [USER, ANSWER | {"tool_calls": CALL}, {"role": "tool", "content": "7", "name": "f"}, ANSWER]},
        {"chat": [USER, ANSWER | {"tool_calls": None}], "tools": CALL, "system": "S"},
    ]
    encode(data_of(folder, template, chats))
    lines = sorted(record.getMessage() for record in caplog.records if " conversations" in record.getMessage())
    ignored = ["'arguments' of 'tool_calls'", "'grade'", "'name'", "'name' of 'tool_calls'", "'reasoning'", "'tools'"]
    ignored += [f"the content of messages with the role {role!r}" for role in ("system", "tool")]
    assert lines == [
        *(f"the chat template ignores {name} in 1 of 3 conversations" for name in ignored),
        "the loss does not count 'reasoning' of the assistant in 1 of 3 conversations",
    ]


TOOL_TEMPLATE = CHATML.replace(
    "{{- message['content'] +", "{{- message['content'] + CALLS if message.tool_calls else message['content'] +"
)
FORMS = {  # how templates print the arguments of a call
    "objects": "(message.tool_calls[0].function.arguments | tojson)",
    "items": "message.tool_calls[0].function.arguments.items() | list | tojson",
    "texts": "message.tool_calls[0].function.arguments",
    "printed": "(message.tool_calls[0].function.arguments | string)",
}


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_what_the_template_expects(folder: str, form: str) -> None:
    """Objects, or JSON texts as OpenAI writes them; beside a content that may be missing, and a text like Python's."""
    user, chats = USER | {"content": "{'x': 1}"}, []
    for content in ({"content": ""}, {"content": None}, {}):
        for arguments in ({"x": 1}, '{"x": 1}'):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            chats.append({"chat": [user, {"role": "assistant", "tool_calls": [call]} | content]})
    first, *others = counted(data_of(folder, TOOL_TEMPLATE.replace("CALLS", f"({FORMS[form]}) + '<|im_end|>'"), chats))
    assert others == [first] * 5
    assert ('[["x", 1]]' if form == "items" else '{"x": 1}') in first.partition("[[")[2]


def test_messages_of_sharegpt_are_those_of_the_template(folder: str) -> None:
    """The parts of a content are joined."""
    question = [{"type": "text", "text": text} for text in "QR"]
    words = {
        "human": question,
        "function_call": '{"name": "f", "arguments": {"x": 1}}',
        "observation": "7",
        "bing": "A",
    }
    chat = [{"from": role, "value": value} for role, value in words.items()]
    records = [{"chat": each, "system": "S"} for each in (chat, json.dumps(chat))]
    found, same = counted(data_of(folder, TOOL_TEMPLATE.replace("CALLS", f"({FORMS['objects']})"), records))
    parts = ["system\nS", "user\nQ\nR<|im_end|>", 'assistant\n[[{"x": 1}', "tool\n7", "assistant\n[[A"]
    assert [part for part in parts if part not in found] == []
    assert same == found


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_records_that_cannot_be_used_are_left_out_if_the_user_says_so(
    folder: str, caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    """Each process gets several batches."""
    records = [{"chat": [USER, ANSWER | {"content": str(i)}] if i % 3 else [ANSWER]} for i in range(2 * BATCH_ITEMS)]
    keys = CHAT | {"dataset__num_proc": processes}
    with pytest.raises(UserError, match="683 of 2,048 records that were read cannot be used"):
        encode(data_of(folder, CHATML, records, **keys))
    found = counted(data_of(folder, CHATML, records, **keys, dataset__skip_invalid=True))
    assert [int(text.partition("[[")[2].partition("<")[0]) for text in found] == [i for i in range(2048) if i % 3]
    assert "683 of 2048 records cannot be used, and are left out; the first: " in caplog.text


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
    folder: str, caplog: pytest.LogCaptureFixture, template: str, text: str, warning: str | None
) -> None:
    (found,) = counted(data_of(folder, template, [{"chat": [USER, ANSWER]}]))
    assert found.endswith(text)
    lines = [record.getMessage() for record in caplog.records if "'s turn" in record.getMessage()]
    assert [warning in line and "QUESTION" in line for line in lines] == [True] if warning else not lines


def test_records_of_weight_0_are_left_out(folder: str) -> None:
    records = [{"chat": [USER, ANSWER | {"content": str(i)}], "weight": (float, str)[i // 2](i % 2)} for i in range(4)]
    records.append({"chat": [USER, ANSWER | {"train": False}], "weight": 1})
    records.append({"chat": [USER, ANSWER], "weight": "", "tools": ""})  # null in a .csv file
    found = counted(data_of(folder, CHATML, records))
    assert [text.partition("[[")[2][0] for text in found] == ["1", "3", "A"]


@pytest.mark.parametrize(
    ("template", "kind"), [(CHATML, "jsonl"), (MARKED["ChatML"], "json text"), (CHATML, "parquet")], ids=repr
)
def test_the_template_gets_the_tools_of_a_record(tmp_path: Path, folder: str, template: str, kind: str) -> None:
    """In a table, all objects have the same keys: those that a record lacks are null there."""
    with_template(folder, TOOLS + template)
    chat = messages([("user", "What is 2 + 2?"), ("assistant", "It is 4.")])
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
    records = [{"chat": chat, "other": "x", "tools": each} for each in given]
    name = write_jsonl(tmp_path / "a.jsonl", records)
    if kind == "parquet":
        pandas.DataFrame(records).to_parquet(name := str(tmp_path / "a.parquet"))
    samples = split(encode(config_of(name, folder, **CHAT)))
    for each, (tokens, _) in zip(tools, samples, strict=True):
        assert tokens == tokenizer.apply_chat_template(chat, each, return_dict=True)["input_ids"]
        assert ("parameters" in tokenizer.decode(tokens)) == (each is not None)


# ------------------------------------------------------------------------------------------------------------ mistakes

GOOD = {"q": "a", "a": "b", "chat": [USER, ANSWER]}
ALPACA = {"dataset__prompt_column": "instruction", "dataset__completion_column": "output"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("bad", "template", "keys", "message"),
    [
        ({"q": "a"}, CHATML, PROMPTS, r"completion_column='a' has no text there; use one of \['q'\]"),
        ([1], CHATML, PROMPTS, "found a list"),
        ({"q": "a", "a": "\udfff"}, CHATML, PROMPTS, "unpaired surrogate"),
        ({"q": [USER], "a": "A"}, CHATML, PROMPTS, "should have two texts, or two lists of messages"),
        ({"chat": [USER]}, CHATML, CHAT, "no message has the role 'assistant'"),
        ({"chat": [USER, ANSWER, ANSWER]}, STRICT, CHAT, "the chat template fails .*must alternate"),
        ({"chat": [USER, ANSWER]}, COUNTING, CHAT, "changes the text before message 2"),
        (
            {"chat": [USER, ANSWER]},
            CHATML + "\n{% endfr %}",
            CHAT,
            "mistake in line .*: Encountered unknown tag 'endfr'",
        ),
        (
            {"chat": [USER, ANSWER]},
            CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ 'Assistant: ' }}"),  # no answer begins so
            CHAT,
            "turn cannot be told apart",
        ),
        (
            {"chat": [USER, ANSWER]},
            "{%- set form = '%d' -%}{{ strftime_now(form) }}" + CHATML,
            CHAT,
            "a format that it computes",
        ),
        (
            {"chat": [USER, ANSWER | {"content": ""}]},
            QUESTIONS_MARKED.replace(".{% end", "{% end"),
            CHAT,
            "marks no text with",
        ),
        ({"chat": [ANSWER]}, CHATML, CHAT, "message 1 is the assistant's"),
        ({"chat": [{"from": ["human"], "value": "a"}]}, CHATML, CHAT, "should have a list of messages there"),
        ({"chat": [USER | {"content": [IMAGE]}, ANSWER]}, CHATML, CHAT, "such as an image"),
        ({"chat": [USER, ANSWER | {"weight": 0.5}]}, CHATML, CHAT, "weight=0.5 should be 0 or 1"),
        (GOOD | {"weight": 2}, CHATML, CHAT, "weight=2 should be 0 or 1"),
        (GOOD | {"tools": [3]}, CHATML, CHAT, "column 'tools' should have a list"),
        (
            GOOD | {"chat": [USER | {"role": "system"}, USER, ANSWER], "system": "s"},
            CHATML,
            CHAT,
            "no message of that role",
        ),
        *(
            (
                {"instruction": "Add", key: "1 2", "output": "3"},
                CHATML,
                ALPACA,
                f"has the column {key!r}, which prompt_c",
            )
            for key in ("input", "history", "system")
        ),
    ],
)
def test_records_that_would_be_half_read_are_refused_with_their_place(
    folder: str, bad: Any, template: str, keys: dict[str, str], message: str
) -> None:
    good = [GOOD] * 2 if template == CHATML and keys != ALPACA else []
    config = data_of(folder, template, [*good, bad], **keys)
    with pytest.raises(UserError, match=rf"a\.jsonl, line {len(good) + 1}: .*{message}") as error:
        encode(config)
    assert len(str(error.value).splitlines()) == 1
    if keys == ALPACA:
        pandas.DataFrame([bad]).to_parquet(table := Path(folder).parent / "a.parquet")
        with pytest.raises(UserError, match=message):
            encode(config_of(str(table), folder, **keys))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("a.txt", CHAT, r"messages_column='chat', but .*a\.txt has no columns"),
        ("a.jsonl", CHAT, "messages_column='chat' needs a chat template"),
        ("a.jsonl", {"model__tokenizer": "bpe", **CHAT}, "which model.tokenizer='bpe' has not"),
        ("a.jsonl", {"model__tokenizer": "ENDLESS", **PROMPTS}, "no end-of-sequence token, which ends a completion"),
    ],
)
def test_data_without_columns_templates_or_ends_are_refused(
    tmp_path: Path, folder: str, name: str, keys: dict[str, str], message: str
) -> None:
    bpe = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(tmp_path / "endless")
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "a.jsonl", [GOOD])
    keys = {"model__tokenizer": folder, "dataset__name": str(tmp_path / name)} | keys
    config = make_config(**{key: value.replace("ENDLESS", str(tmp_path / "endless")) for key, value in keys.items()})
    with pytest.raises(UserError, match=message):
        write_tokens(config, tiny_llama(vocab_size=300))


def test_a_slow_tokenizer_must_tell_where_a_completion_begins(tmp_path: Path, folder: str) -> None:
    """ByT5 drops white space before </s>."""
    make_tokenizer("ByT5", 480).save_pretrained(tmp_path / "slow")
    name = write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "a": "b"}, {"q": "What?\n", "a": "</s>b"}])
    message = r"cannot begin or end at '</s>b' after 'What\?\\n'; choose a model\.tokenizer with a tokenizer\.json"
    with pytest.raises(UserError, match=message):
        encode(config_of(name, str(tmp_path / "slow")), 480)
