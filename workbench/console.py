"""Programs on the terminal: tables, lines that nobody may read any more, arguments, and errors of libraries."""

import argparse
import errno
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

from picotron.console import UserError


def text_table(rows: Sequence[Sequence[str]], first_number: int | None = None) -> str:
    """Format rows of cells as aligned columns.

    Args:
        first_number: index of the first column of numbers. It and the columns after it are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = len(widths) if first_number is None else first_number
    lines = (
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


READER_IS_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, such as `| head`, or a closed terminal


def print_line(line: str, end: str = "\n", file: IO[str] | None = None) -> None:
    """Print a line to the standard output, or to another stream. Once the terminal or the reader of a pipe is gone, or
    a disk is full, output is dropped, and the program continues. Characters that the encoding lacks become question
    marks.
    """
    stream: Any = file or sys.stdout
    if stream is None:  # it was closed before the program started, as some daemons do
        return
    encoding = stream.encoding or "utf-8"
    try:
        print(line.encode(encoding, "replace").decode(encoding), end=end, flush=True, file=stream)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if error.errno not in READER_IS_GONE and stream is not sys.stderr:
            text = f"the standard output cannot be written: {error.strerror}; the rest of it is dropped"
            print_line(text, file=sys.stderr)


def is_rank_0() -> bool:
    """Whether this process is rank 0, or no rank, also before there are process groups."""
    return int(os.environ.get("RANK", 0)) == 0


class LinePrinter(logging.Handler):
    """Print each record to the standard output, see `print_line`."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(self.format(record))


class Parser(argparse.ArgumentParser):
    """Parser for programs that torchrun starts. Rank 0 prints the help, and mistakes are UserErrors, which are printed
    only once, too.
    """

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if is_rank_0():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help lists all arguments")


def number(kind: type[int] | type[float], least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    """Return a type for argparse: finite numbers from `least` to `most`. Other words end the program."""

    def parse(word: str) -> float:
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if least <= value <= most:
            return value
        limits = f"of at least {least}" if most == sys.float_info.max else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{word!r} should be {'an integer' if kind is int else 'a number'} {limits}")

    return parse


def invalid_value(error: Any) -> str:
    """Format an error of pydantic (an item of `ValidationError.errors()`) with the key and the value."""
    key, value = ".".join(map(str, error["loc"])), json.dumps(error["input"], default=str)[:200]
    return f"{key}={value}: {error['msg'].replace('Input should', 'it should')}"


def first_line(error: Exception) -> str:
    """First line of another library's error message, to be quoted in a message of ours, which names the file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
