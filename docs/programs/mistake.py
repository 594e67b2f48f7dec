"""A classic mistake: see mistakes.py for the tests that catch them, and broken_run.py for runs with them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake, and the test that catches it.

    Args:
        page: page of docs/ that explains the mistake.
        description: the mistake in one sentence.
        replacements: replacement of each function, by the function's dotted name.
        test, arguments: the test, and its arguments after the pool.
    """

    page: str
    description: str
    replacements: dict[str, Any]
    test: Callable[..., None]
    arguments: tuple[Any, ...]


@contextmanager
def replaced(replacements: Mapping[str, Any]) -> Iterator[None]:
    """Replace functions, given by their dotted names, in a `with` block."""
    with ExitStack() as stack:
        for target, replacement in replacements.items():
            stack.enter_context(mock.patch(target, replacement))
        yield
