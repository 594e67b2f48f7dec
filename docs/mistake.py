"""A classic mistake, and the test that catches it, see docs/mistakes.py."""

import dataclasses
from collections.abc import Callable
from typing import Any


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
