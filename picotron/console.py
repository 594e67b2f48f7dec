"""Errors that users can fix, as sentences."""

import json
from typing import Any


class UserError(ValueError):
    """Mistakes that the user can fix. The message is all that the user needs, so programs print no traceback.

    Args:
        problems: one sentence for each mistake, with the value and the remedy.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join([f"{len(self.problems)} problems:", *(f"  - {problem}" for problem in self.problems)])


def invalid_value(error: Any) -> str:
    """Format an error of pydantic (an item of `ValidationError.errors()`) with the key and the value."""
    key, value = ".".join(map(str, error["loc"])), json.dumps(error["input"], default=str)[:200]
    return f"{key}={value}: {error['msg'].replace('Input should', 'it should')}"


def first_line(error: Exception) -> str:
    """First line of another library's error message, to be quoted in a message of ours, which names the file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
