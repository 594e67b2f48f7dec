"""Checks whether a trainer computes what one process of transformers computes:

    python -m conformance                                        list the chapters
    python -m conformance ADAPTER.py                             every chapter in a few layouts
    python -m conformance ADAPTER.py --full                      every chapter in every layout
    python -m conformance ADAPTER.py --only resume --layouts "dp2 x pp2" tp2

The page docs/reference/conformance.md explains the chapters and how to write an adapter.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path

import transformers

from conformance.case import is_mistyped_size
from conformance.chapters import CHAPTERS, PAIRS, SINGLE, STEPS
from conformance.check import Checker, Row


def python_file(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise argparse.ArgumentTypeError(f"{text!r} is not a Python file; give the path of an adapter")
    return path


def layout(text: str) -> str:
    for word in text.split():
        if is_mistyped_size(word):
            raise argparse.ArgumentTypeError(f"{word!r} in {text!r} is not a size; write sizes as in 'dp2 x tp2'")
    return text


def writable_file(text: str) -> Path:
    if not (path := Path(text)).resolve().parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder")
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance", description="Check what a trainer computes.")
    parser.add_argument(
        "adapter", type=python_file, nargs="?", help="Python file with a function run(case) [list the chapters]"
    )
    parser.add_argument("--only", nargs="+", choices=CHAPTERS, default=list(CHAPTERS), help="chapters [all]")
    parser.add_argument("--layouts", nargs="+", type=layout, help='layouts, such as dp2 "dp2 x pp2 zbv"')
    parser.add_argument(
        "--full", action="store_true", help="every chapter in pairs of axes and in the adapter's layouts"
    )
    parser.add_argument("--json", type=writable_file, help="file for the results")
    parser.add_argument("--badge", type=writable_file, help="file for a picture of the verdict (.svg)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a case hangs [60]")
    parser.add_argument("--trace", action="store_true", help="name the first wrong tensor of each row that differs")
    parser.add_argument("--torchrun", action="store_true", help="start the ranks of each case with torchrun (slow)")
    return parser.parse_args()


def plan(checker: Checker, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Return the rows of a run: chapter, layout, and another layout to resume in."""
    rows, own = [], getattr(checker.adapter, "LAYOUTS", ())
    for chapter in options.only:
        default = [*STEPS, *own] if chapter == "steps" else [*SINGLE, *PAIRS, *own] if options.full else SINGLE
        layouts = options.layouts or [layout for layout in default if not checker.without_axes(layout)]
        others = [*layouts[1:], layouts[0]] if len(set(layouts)) > 1 else ["dp1"] * len(layouts)
        rows += [(chapter, layout, other) for layout, other in zip(layouts, others, strict=True)]
    return rows


def badge(rows: list[Row]) -> str:
    """Return a picture of the verdict (SVG): the number of checks that are equal, of those that the adapter offers."""
    offered = [row for row in rows if row.verdict != "not offered"]
    good = sum(not row.is_bad for row in offered)
    colour, text = "#2a7d4f" if good == len(offered) > 0 else "#b3402a", f"{good} of {len(offered)} equal"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="200" height="20" font-family="sans-serif" font-size="11" fill="#fff">'
        f'<rect width="90" height="20" fill="#444"/><rect x="90" width="110" height="20" fill="{colour}"/>'
        f'<text x="45" y="14" text-anchor="middle">conformance</text><text x="145" y="14" text-anchor="middle">{text}</text></svg>\n'
    )


def main() -> int:
    options, began = parse_arguments(), time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    if options.adapter is None:
        print(*(f"{name:12} {chapter.summary}" for name, chapter in CHAPTERS.items()), sep="\n")
        return 0
    rows: list[Row] = []
    with Checker(options.adapter, options.timeout, options.torchrun, options.trace) as checker:
        for chapter, layout, other in plan(checker, options):
            rows.append(checker.check(chapter, layout, other))
            print(rows[-1], flush=True)
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.badge:
        options.badge.write_text(badge(rows))
    return 0 if any(row.verdict == "equal" for row in rows) and not any(row.is_bad for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
