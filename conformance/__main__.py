"""Checks whether a trainer computes what one process of transformers computes:

    python -m conformance                                        list the chapters
    python -m conformance ADAPTER.py                             every chapter in a few layouts
    python -m conformance ADAPTER.py --full                      every chapter in more layouts
    python -m conformance ADAPTER.py --only run --layouts "dp2 x pp2" tp2
    python -m conformance ADAPTER.py --write FOLDER              write the cases, for a launcher of your own
    python -m conformance [ADAPTER.py] --judge FOLDER            judge what its ranks have written

The page docs/reference/conformance.md explains the chapters and how to write an adapter.
"""

import argparse
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import torch
import transformers

from conformance import __version__
from conformance.case import is_mistyped_size
from conformance.chapters import CHAPTERS
from conformance.check import CRASHED, DIFFERS, EQUAL, HANGS, KNOWN, NOT_OFFERED, Checker, Row


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
    try:
        (path := Path(text)).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
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
    parser.add_argument(
        "--junit", type=writable_file, help="file for the results, as continuous integration reads them"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a case hangs [60]")
    parser.add_argument("--seed", type=int, default=0, help="draws other weights and batches [0]")
    parser.add_argument("--trace", action="store_true", help="trace each row [only the first that differs]")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write the cases, and print their ranks and folders"
    )
    parser.add_argument(
        "--judge", type=Path, metavar="FOLDER", help="judge the outcomes in a folder that --write wrote"
    )
    options = parser.parse_args()
    if options.write and options.write.exists() and any(options.write.iterdir()):
        parser.error(f"{str(options.write)!r} has files already; --write needs a new folder")
    if options.judge and not any(options.judge.glob("*/1/case.json")):
        parser.error(f"{str(options.judge)!r} is not a folder that --write wrote")
    if options.write and (options.judge or not options.adapter):
        parser.error("--write needs an adapter, and is a run of its own")
    if options.judge and options.trace:
        parser.error("--trace needs ranks that this program starts; leave out --judge")
    return options


def versions(adapter: Path | None) -> dict[str, str]:
    """Return what results depend on: versions, and the adapter with the commit of its repository."""
    found = {"conformance": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    if adapter is not None:
        found |= {"adapter": str(adapter), "commit": ""}
        if git := shutil.which("git"):
            command = [git, "-C", str(adapter.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            found["commit"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found


def junit(rows: list[Row], properties: dict[str, str]) -> ET.ElementTree:
    """Return the rows as a JUnit report."""
    counts = Counter(row.verdict for row in rows)
    suite = ET.Element(
        "testsuite",
        name="conformance",
        tests=str(len(rows)),
        failures=str(counts[DIFFERS]),
        errors=str(counts[CRASHED] + counts[HANGS]),
        skipped=str(counts[NOT_OFFERED] + counts[KNOWN]),
    )
    ET.SubElement(suite, "properties").extend(
        ET.Element("property", name=name, value=value) for name, value in properties.items()
    )
    for row in rows:
        seconds = f"{row.seconds:.3f}"
        test = ET.SubElement(suite, "testcase", classname=f"conformance.{row.chapter}", name=row.layout, time=seconds)
        if row.verdict != EQUAL:
            kind = "failure" if row.verdict == DIFFERS else "error" if row.is_bad else "skipped"
            found = ET.SubElement(test, kind, message=printable(f"{row.verdict}: {row.detail}"))
            found.text = printable(f"{row.trace}\n{row.log}")
    return ET.ElementTree(suite)


def printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable() or c == "\n")


def main() -> int:
    options, began = parse_arguments(), time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    if options.adapter is None and options.judge is None:
        print(*(f"{name:12} {chapter.summary}" for name, chapter in CHAPTERS.items()), sep="\n")
        return 0
    rows: list[Row] = []
    checker = Checker(options.adapter, options.timeout, options.trace or None, options.seed)
    plan = checker.plan(options.only, options.layouts, options.full)
    if options.write is not None:
        for case in checker.write_cases(plan, options.write):
            print(case.world_size, case.folder, flush=True)
        return 0
    for row in checker.judge_cases(options.judge) if options.judge else (checker.check(*each) for each in plan):
        rows.append(row)
        print(printable(str(row)), flush=True)
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.json:
        results = versions(options.adapter) | {"rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.junit:
        junit(rows, versions(options.adapter)).write(options.junit, "unicode")
    return 0 if counts[EQUAL] + counts[KNOWN] and not any(row.is_bad for row in rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader of a pipe, such as head, can stop before the end
    sys.exit(main())
