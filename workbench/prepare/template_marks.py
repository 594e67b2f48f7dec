"""One question to a chat template: what of a conversation does it print, and what of that does the loss count?

Each text and number of a conversation gets a mark of its own, and the template renders it. A part without a mark in the
text is asked for again, alone: it is ignored if other values in its place give the same text.
"""

import copy
import functools
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

Conversation = dict[str, Any]
"""{"messages": ..., "tools": ..., "wanted": numbers of the messages that the loss counts}"""
Place = tuple[Any, ...]
"""keys and numbers that lead to a value in a conversation"""
Text = tuple[str, str]
"""what a template prints for a conversation, and what the loss counts of it"""
Names = tuple[set[str], set[str]]
"""names of what the template ignores, and of what it prints and the loss does not count"""

COMPARED = {"id", "tool_call_id", "type", "index"}  # keys whose values a template may compare or measure: not asked for


def leaves(value: Any, place: Place) -> Iterator[Place]:
    """Yield the places of the texts and numbers in a value."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*place, key))
    elif (isinstance(value, str) and value.strip() and place[-1] not in COMPARED) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    ):
        yield place


def parts(conversation: Conversation) -> dict[tuple[int, str, str], list[Place]]:
    """Return the places of what a template prints together, by the number of a message, its key, and a name: first the
    content of a message, then its other keys; arguments of calls have all one name; and all tools, as of message -1.
    """
    found: dict[tuple[int, str, str], list[Place]] = {(-1, "", "'tools'"): [*leaves(conversation["tools"], ("tools",))]}
    for i, message in enumerate(conversation["messages"]):
        for key in sorted(message.keys() - {"role"}, key=lambda key: (key != "content", key)):
            for place in leaves(message[key], ("messages", i, key)):
                last = "arguments" if "arguments" in place else [each for each in place if isinstance(each, str)][-1]
                name = repr(key) if last == key else f"{last!r} of {key!r}"
                found.setdefault((i, key, name), []).append(place)
    return {part: places for part, places in found.items() if places}


def changed(conversation: Conversation, marks: dict[Place, str]) -> Conversation:
    """Return a copy of a conversation with marks after the texts, and in place of the numbers, in some places."""
    conversation = copy.deepcopy(conversation)
    for (*path, key), mark in marks.items():
        inner = functools.reduce(operator.getitem, path, conversation)
        inner[key] = inner[key] + mark if isinstance(inner[key], str) else int(mark)
    return conversation


def shape_of(value: Any, key: Any = None) -> Any:
    """Return what a template may treat differently: types and keys, roles, and whether texts are empty."""
    if isinstance(value, dict):
        return "object" if key == "arguments" else {name: shape_of(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    if isinstance(value, str) and key != "role":
        return bool(value.strip())
    return value if isinstance(value, bool | str) else type(value).__name__


class Marks:
    """The answers for the conversations of a data set. Conversations of one shape share one.

    Args:
        render: function that renders a conversation. It may raise anything.
    """

    def __init__(self, render: Callable[[Conversation], Text]) -> None:
        self.render = render
        self.answers: dict[str, Names] = {}

    def __call__(self, conversation: Conversation) -> Names:
        """Return the answer for a conversation, from an earlier one of the same shape if possible."""
        shape = [shape_of(conversation["messages"]), bool(conversation["tools"]), conversation["wanted"]]
        if (text := json.dumps(shape, sort_keys=True)) not in self.answers:
            self.answers[text] = self.ask(conversation)
        return self.answers[text]

    def ask(self, conversation: Conversation) -> Names:
        found, ignored, uncounted, unread = parts(conversation), set[str](), set[str](), set[int]()
        marks = {place: f"48151{i:05}62" for i, place in enumerate(place for each in found.values() for place in each)}
        plain = self.attempt(conversation)
        text, counted = self.attempt(changed(conversation, marks)) or ("", "")
        for (i, key, name), places in found.items():
            role, is_wanted = conversation["messages"][i]["role"], i in conversation["wanted"]
            if shown := [marks[place] for place in places if marks[place] in text]:
                if is_wanted and key != "name" and not any(mark in counted for mark in shown):
                    uncounted.add(repr(key))
            elif i in unread or (role == "assistant" and not is_wanted and key not in ("", "content")):
                continue  # of a message that is ignored; or reasoning, which may be left out of earlier turns
            elif self.attempt(changed(conversation, {place: marks[place] for place in places})) == plain:
                ignored.add(f"the content of messages with the role {role!r}" if key == "content" else name)
                unread |= {i} if key == "content" else set()
        return ignored, uncounted

    def attempt(self, conversation: Conversation) -> Text | None:
        """Render a conversation. Returns None if the template cannot."""
        try:
            return self.render(conversation)
        except Exception:  # a template is a program, and may raise anything
            return None
