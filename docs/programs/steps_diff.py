"""Difference between functions or classes of a step of docs/steps and those of the step before:

python -m docs.programs.steps_diff s3_sp parallelize train_step
"""

import argparse
import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("docs/steps")
NAMES = sorted(path.stem for path in FOLDER.glob("s[1-9]_*.py"))


def lines_of(name: str, symbol: str) -> list[str]:
    """Return the lines of a function or class of a step, such as `Bucket.ready`; none if it is not there."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    found: ast.AST = ast.parse("\n".join(lines))
    for part in symbol.split("."):
        inner = [node for node in getattr(found, "body", []) if getattr(node, "name", None) == part]
        if not inner:
            return []
        found = inner[0]
    return lines[found.lineno - 1 : found.end_lineno]  # type: ignore[attr-defined]


def difference(name: str, *symbols: str) -> Iterator[str]:
    """Yield the unified difference of functions or classes to those of the step before, without headers."""
    before = NAMES[NAMES.index(name) - 1]
    for symbol in symbols:
        old, new = lines_of(before, symbol), lines_of(name, symbol)
        if not old and not new:
            raise SystemExit(f"neither {before} nor {name} has a function or class {symbol!r}")
        hunks = difflib.unified_diff(old, new, n=1, lineterm="")
        yield from ("..." if line.startswith("@@") else line for line in hunks if line[:3] not in ("---", "+++"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Show how parts of a step differ from the step before.")
    parser.add_argument("step", choices=NAMES[1:])
    parser.add_argument("symbols", nargs="+", help="functions and classes, such as Bucket.ready")
    options = parser.parse_args()
    print("\n".join(difference(options.step, *options.symbols)).removeprefix("...\n"))


if __name__ == "__main__":
    main()
