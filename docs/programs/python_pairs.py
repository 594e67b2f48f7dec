"""Write pairs of prompt and completion from Python's standard library: signature and docstring -> body.

python -m docs.programs.python_pairs pairs.jsonl
"""

import ast
import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from workbench.files import write_atomically
from workbench.prepare.documents import python_stdlib

CHARACTERS = range(80, 500)  # of a pair, so that it fits into a short sequence
DOCSTRING_LINES = 4


def pairs_of(source: str) -> Iterator[dict[str, str]]:
    """Yield a pair for each function of a file that has a docstring and a body after it."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        docstring, *body = node.body
        first, start, end = node.lineno - 1, docstring.end_lineno or 0, body[-1].end_lineno or 0
        if start == body[0].lineno or docstring.lineno + DOCSTRING_LINES <= start:
            continue  # something follows the docstring on its line, or it is long
        prompt, completion = ("".join(_dedent(lines[a:b], node.col_offset)) for a, b in ((first, start), (start, end)))
        if len(prompt) + len(completion) in CHARACTERS:
            yield {"prompt": prompt, "completion": completion}


def _dedent(lines: list[str], columns: int) -> list[str]:
    return [line[min(columns, len(line) - len(line.lstrip(" "))) :] for line in lines]


def all_pairs() -> list[dict[str, str]]:
    """Return the pairs of all files in a random order, so that the last ones, which are held out, are of all files."""
    found: dict[str, dict[str, str]] = {}
    warnings.simplefilter("ignore", SyntaxWarning)  # of old sources
    for file in python_stdlib():
        for pair in pairs_of(file.read_text(errors="replace")):
            found.setdefault(pair["prompt"], pair)
    pairs = list(found.values())
    random.Random(0).shuffle(pairs)
    return pairs


def main(path: str) -> None:
    pairs = all_pairs()
    write_atomically(Path(path), "".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"{len(pairs):,} pairs in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
