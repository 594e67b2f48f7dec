"""What random templates do not print of random conversations is named: they are made of parts, so it is known."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from workbench.prepare.conversations import ChatTemplate

KEYS = ("name", "reasoning", "grade")


def draw_template(dice: random.Random) -> tuple[str, set[str], set[str], str]:
    """Return a template, the roles and the keys of messages that it prints, and what it prints of calls."""
    roles = {"user", "assistant", *dice.sample(("system", "tool", "developer"), dice.randint(0, 3))}
    keys = set(dice.sample(KEYS, dice.randint(0, 3)))
    calls = dice.choice(("", "f.name", "f.name ~ (f.arguments | tojson)", "(f.arguments.items() | list)"))
    strict = "{%- if m.role == 'tool' and m.tool_call_id | length != 9 -%}{{ raise_exception('nine!') }}{%- endif -%}"
    body = "".join(f"{{%- if m.{key} -%}}{{{{ '{key}' ~ m.{key} }}}}{{%- endif -%}}" for key in sorted(keys))
    if calls:
        body += f"{{%- for c in m.tool_calls or [] -%}}{{%- set f = c.function -%}}{{{{ {calls} }}}}{{%- endfor -%}}"
    if dice.random() < 0.5:  # parses the arguments, or fails without them
        body += (
            "{%- for c in m.tool_calls or [] -%}{%- if c.function.arguments.x > 10**30 -%}!{%- endif -%}{%- endfor -%}"
        )
    text = (
        "{%- for m in messages -%}"
        + (strict if dice.random() < 0.5 else "")
        + f"{{%- if m.role in {sorted(roles)} -%}}{{{{ '<' + m.role + '>' + (m.content or '') }}}}{body}{{{{ '<end>' }}}}"
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
    )
    return text, roles, keys, calls


def draw_message(dice: random.Random, role: str) -> dict[str, Any]:
    message = {"role": role, "content": f"{role} {dice.random()}"}
    for key in dice.sample(KEYS, dice.randint(0, 2)):
        message[key] = dice.choice((7, 2.5)) if key == "grade" else f"some {key}"
    if role == "tool":
        message["tool_call_id"] = "call00001"
    if role == "assistant" and dice.random() < 0.5:
        function = {"name": "add", "arguments": dice.choice(({"x": 1, "y": "two"}, '{"x": 1, "y": "two"}'))}
        message |= {"content": dice.choice(("", None, "calls")), "tool_calls": [{"id": "1", "function": function}]}
    return message


def expected(message: dict[str, Any], roles: set[str], keys: set[str], calls: str) -> set[str]:
    if message["role"] not in roles:
        return {f"the content of messages with the role {message['role']!r}"}
    found = {repr(key) for key in KEYS if key in message and key not in keys}
    if "tool_calls" in message:
        found |= {f"{each!r} of 'tool_calls'" for each in ("name", "arguments") if f"f.{each}" not in calls}
    return found


@pytest.mark.parametrize("seed", range(15))
def test_what_a_template_ignores_is_named(folder: str, seed: int) -> None:
    tokenizer, dice = AutoTokenizer.from_pretrained(Path(folder)), random.Random(seed)
    for _ in range(10):
        tokenizer.chat_template, roles, keys, calls = draw_template(dice)
        notes, names = Counter(), Counter()
        template = ChatTemplate(tokenizer, "a test", notes)
        for _ in range(3):
            drawn = [
                draw_message(dice, dice.choice(("system", "tool", "developer", "user", "assistant"))) for _ in range(4)
            ]
            messages = [{"role": "user", "content": "Q"}, *drawn, draw_message(dice, "assistant")]
            counted = template(messages)[-1].text
            names.update(set().union(*(expected(each, roles, keys, calls) for each in messages)))
            printed = [each["content"] for each in messages if each["role"] in roles and each["content"]]
            assert all(content in counted for content in printed)
        assert {note.removeprefix("the chat template ignores "): count for note, count in notes.items()} == names
