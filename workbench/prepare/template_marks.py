"""One question to a chat template: what of a conversation does it print, and what of that does the loss count?

Each text and number of a conversation gets a mark of its own, and the template renders it. What the marks do not show
is asked again, one by one: a value is ignored if another one in its place gives the same text.
"""

import copy
import functools
import json
import operator
from collections.abc import Callable, Container, Iterator
from typing import Any

Place = tuple[Any, ...]
"""keys and numbers that lead to a value in a conversation, {"messages": ..., "tools": ...}"""
Text = tuple[str, str]
"""what a template prints for a conversation, and what the loss counts of it"""

THINKS = "</think>"  # ends a reasoning that is part of a content
ARGUMENTS = "the arguments of "
UNMARKED = {"id", "tool_call_id", "type", "index"}  # keys whose values a template may compare or measure


def mark_of(number: int) -> str:
    return f"48151{number:05}62"


def leaves(value: Any, place: Place) -> Iterator[Place]:
    """Yield the places of the texts and numbers in a value."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*place, key))
    elif (isinstance(value, str) and value.strip()) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield place


def groups(conversation: dict[str, Any]) -> dict[tuple[int, str], list[Place]]:
    """Return the places of what a template prints together, by the number of the message and a name: its content, each
    other key, and the arguments of calls; and all tools, as of message -1.
    """
    found = {(-1, "tools"): [*leaves(conversation["tools"], ("tools",))]}
    for i, message in enumerate(conversation["messages"]):
        for key in sorted(message.keys() - {"role"}):
            for place in leaves(message[key], ("messages", i, key)):
                name = f"{ARGUMENTS}{key}" if "arguments" in place[3:] else key
                found.setdefault((i, name), []).append(place)
    return {group: places for group, places in found.items() if places}


def changed(conversation: dict[str, Any], marks: dict[Place, str]) -> dict[str, Any]:
    """Return a copy of a conversation with marks after the texts, and in place of the numbers, in some places."""
    conversation = copy.deepcopy(conversation)
    for place, mark in marks.items():
        *path, key = place
        inner = functools.reduce(operator.getitem, path, conversation)
        reasoning, end, text = str(inner[key]).rpartition(THINKS)
        inner[key] = f"{reasoning}{mark if end else ''}{end}{text}{mark}" if isinstance(inner[key], str) else int(mark)
    return conversation


def shape_of(value: Any, key: Any = None) -> Any:
    """Return what a template may treat differently: types and keys, roles, and whether texts are empty or think."""
    if isinstance(value, dict):
        return "object" if key == "arguments" else [[each, shape_of(value[each], each)] for each in sorted(value)]
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    if isinstance(value, str) and key != "role":
        return ["text", bool(value.strip()), THINKS in value]
    return value if isinstance(value, bool | str) else type(value).__name__


def name_of(group: tuple[int, str], ignored: Container[Any], found: Container[Any], messages: Any) -> str:
    """Return the name of what is ignored, or that of what it belongs to, if all of that is."""
    i, name = group
    if (i, "content") in ignored:
        return f"the content of messages with the role {messages[i]['role']!r}"
    key = name.removeprefix(ARGUMENTS)
    if (i, key) in ignored and ((i, ARGUMENTS + key) in ignored or (i, ARGUMENTS + key) not in found):
        return repr(key)
    return f"{ARGUMENTS}{key!r}" if name != key else f"what {key!r} has beside arguments"


class Marks:
    """The answers for the conversations of a data set. Conversations of one shape share one.

    Args:
        render: function that renders a conversation. It may raise anything.
    """

    def __init__(self, render: Callable[[dict[str, Any]], Text]) -> None:
        self.render = render
        self.answers: dict[str, tuple[set[str], set[str]]] = {}

    def __call__(self, conversation: dict[str, Any]) -> tuple[set[str], set[str]]:
        """Return the names of what the template ignores, and of what it prints and the loss does not count.

        Args:
            conversation: "messages", "tools", and "wanted", the numbers of the messages that the loss counts.
        """
        shape = json.dumps([shape_of(conversation["messages"]), bool(conversation["tools"]), conversation["wanted"]])
        if shape not in self.answers:
            self.answers[shape] = self.ask(conversation)
        return self.answers[shape]

    def ask(self, conversation: dict[str, Any]) -> tuple[set[str], set[str]]:
        found, ignored, uncounted = groups(conversation), set[tuple[int, str]](), set[str]()
        places = [place for each in found.values() for place in each if place[-1] not in UNMARKED]
        marks = {place: mark_of(i) for i, place in enumerate(places)}
        plain = self.attempt(conversation)
        text, counted = self.attempt(changed(conversation, marks)) or ("", "")
        for (i, name), group in found.items():
            role, is_wanted = conversation["messages"][i]["role"], i in conversation["wanted"]
            shown = [marks[place] for place in group if place in marks and marks[place] in text]
            if shown and is_wanted and name != "name" and not any(mark in counted for mark in shown):
                uncounted.add(name.removeprefix(ARGUMENTS))
            if shown or (role == "assistant" and not is_wanted and name != "content" and i >= 0):
                continue  # a reasoning may be left out of earlier turns
            others = [self.attempt(changed(conversation, {place: mark_of(0)})) for place in group]
            if all(other is not None and other == plain for other in others):
                ignored.add((i, name))
        return {name_of(each, ignored, found, conversation["messages"]) for each in ignored}, uncounted

    def attempt(self, conversation: dict[str, Any]) -> Text | None:
        """Render a conversation. Returns None if the template cannot."""
        try:
            return self.render(conversation)
        except Exception:  # a template is a program, and may raise anything
            return None
