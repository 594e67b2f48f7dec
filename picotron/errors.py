"""Errors that users can fix."""

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


class InvalidValue(Exception):
    """The end of a check that has read an invalid value of the config, whose error is reported already."""


class Problems:
    """Collector of the problems of several checks, which are all reported together:

    problems = Problems()
    with problems:
        check_one(config)
    with problems:
        check_another(config)
    problems.report()
    """

    def __init__(self, *found: str) -> None:
        self.found = list(found)
        self.invalid_value: InvalidValue | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, UserError):
            self.found += error.problems
        elif isinstance(error, InvalidValue):
            self.invalid_value = error
        return isinstance(error, UserError | InvalidValue)

    def report(self) -> None:
        """Raise a UserError with all problems. If there are none, but a check could not end, raise InvalidValue."""
        if self.found:
            raise UserError(*dict.fromkeys(self.found))
        if self.invalid_value:
            raise self.invalid_value


def invalid_value(error: Any) -> str:
    """Format an error of pydantic (an item of `ValidationError.errors()`) with the key and the value."""
    key, value = ".".join(map(str, error["loc"])), json.dumps(error["input"], default=str)[:200]
    return f"{key}={value}: {error['msg'].replace('Input should', 'it should')}"


def first_line(error: Exception) -> str:
    """First line of another library's error message, to be quoted in a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
