"""Command-line arguments: their parser in programs that run as several processes, and their types."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import IO, NoReturn

from picotron.errors import UserError


class Parser(argparse.ArgumentParser):
    """Parser for programs that torchrun starts. Rank 0 prints the help, and mistakes are UserErrors, which are printed
    only once, too.
    """

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if int(os.environ.get("RANK", 0)) == 0:
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
