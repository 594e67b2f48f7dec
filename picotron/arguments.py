"""Types of command-line arguments."""

import argparse
import math
import sys
from collections.abc import Callable


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
