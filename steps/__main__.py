"""List the steps, or show how a step differs from the step before:

python -m steps                               what each step adds, its lines, and how many are new
python -m steps s4_dp                         the difference of the whole file
python -m steps s3_sp parallelize train_step  the difference of functions, methods or classes
"""

import argparse
import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
STEPS = [path.stem for path in FOLDER.glob("s[0-9]*.py")]
NAMES = sorted(STEPS, key=lambda name: int(name[1:].split("_")[0]))
# The program that each one changes.
BEFORE = dict(zip(NAMES[1:], NAMES, strict=False)) | {"only_dp": "s1_one_process", "clip": "s9_cp"}
WHOLE = NAMES[1:9]  # those that do not import the program that they change


def lines_of(name: str, symbol: str = "") -> list[str]:
    """Return the lines of a function or class of a step, such as `Bucket.ready`, if it is there.

    Without a symbol, return all lines below the docstring of the file.
    """
    text = (FOLDER / f"{name}.py").read_text()
    lines, found = text.splitlines(), ast.parse(text)
    if not symbol:
        return lines[found.body[0].end_lineno :]
    for part in symbol.split("."):
        inner = [node for node in getattr(found, "body", []) if getattr(node, "name", None) == part]
        if not inner:
            return []
        found = inner[0]
    return lines[found.lineno - 1 : found.end_lineno]  # type: ignore[attr-defined]


def difference(name: str, *symbols: str) -> Iterator[str]:
    """Yield the unified difference of symbols, or of the files, to the step before."""
    before = BEFORE[name]
    for symbol in symbols or ("",):
        old, new = lines_of(before, symbol), lines_of(name, symbol)
        if not old and not new:
            raise SystemExit(f"neither {before} nor {name} has a function or class {symbol!r}")
        hunks = difflib.unified_diff(old, new, n=1, lineterm="")
        lines = [line for line in hunks if line[:3] not in ("---", "+++")]
        yield from ("..." if line.startswith("@@") else line for line in lines)


def table() -> Iterator[str]:
    """Yield a line for each program: its lines, which are new or removed, and what it does."""
    yield f"{'':14} {'lines':>5} {'added':>5} {'removed':>7}"
    alone = sorted(path.stem for path in FOLDER.glob("only_*.py"))
    for name in [*NAMES, "clip", *alone, "llama", "communication"]:
        text = (FOLDER / f"{name}.py").read_text()
        signs = [line[:1] for line in difference(name)] if name in WHOLE else []
        changes = f"{signs.count('+'):5} {signs.count('-'):7}" if signs else " " * 13
        title = re.sub(r'^"""(Step \d+, )?|\.$', "", text.splitlines()[0])
        title = title if name in NAMES else title[0].lower() + title[1:]
        yield f"{name:14} {len(text.splitlines()):5} {changes}  {title}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("step", nargs="?", choices=BEFORE)
    parser.add_argument("symbols", nargs="*", help="functions and classes, such as Bucket.ready")
    options = parser.parse_args()
    lines = difference(options.step, *options.symbols) if options.step else table()
    print("\n".join(lines).removeprefix("...\n"))


if __name__ == "__main__":
    main()
