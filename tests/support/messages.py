"""What a function says, in processes where pytest's fixtures are not: its error, and its warnings."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from picotron.console import UserError


def error_of(action: Callable[[], object]) -> str:
    """Run an action. Returns its UserError, or "no error"."""
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """Context with a list that gets the warnings."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("picotron").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("picotron").removeHandler(handler)
