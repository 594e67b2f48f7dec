"""Check of `--trace`: does it name the tensor that a mistake makes wrong, and none where nothing is wrong?

python -m conformance.trace_faults [--only NAME ...]     plant each of `MISTAKES` that has a `place`
python -m conformance.trace_faults --equal [LAYOUT ...]  trace layouts that are equal: the grid, with examples
"""

import argparse
import contextlib
import functools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import transformers

from conformance.check import DIFFERS, EQUAL, Checker, Row
from conformance.grid import LAYOUTS
from conformance.mistakes import ADAPTER, MISTAKES, Mistake
from conformance.mutants import EXAMPLES, IGNORED, ROOT, command, planted

# Chapters that say most about a trainer, in the layouts of each adapter in which it is known to be equal.
OTHERS = {
    "ddp": ["step dp2", "run dp2", "run dp2", "run dp2 tied"],
    "zero1": ["run dp2", "run dp2", "run dp2", "run dp2"],
    "pipeline": ["step pp4", "run pp2 tied", "run pp2", "step pp2 afab"],
    "ring": ["step cp2", "step cp4", "run cp2", "run cp2 tied"],
    "plain_tp": ["step tp2", "run tp4", "run tp2 tied", "run tp2", "run tp2"],
    "torch_ddp": ["run dp2", "run dp2"],
    "torch_fsdp": ["run dp2", "run dp2 tied", "run dp2"],
    "torch_tp": ["step tp2", "run tp2"],
    "torch_pp": ["step pp2", "step pp2 ZBVZeroBubble", "step pp2 Interleaved1F1B"],
}


def path_of(adapter: str) -> Path:
    folder = "examples" if f"conformance/examples/{adapter}.py" in EXAMPLES else "adapters"
    return ROOT / "conformance" / folder / f"{adapter}.py"


def trace(mistake: Mistake, checkers: "functools._lru_cache_wrapper[Checker]", folder: Path) -> Row:
    """Check a trainer with a mistake, and trace it: an adapter's in a file, picotron's in a copy of the checkout."""
    words = command(next(check for check in reversed(mistake.found_by) if check != "fuzz"), mistake)
    adapter, chapter, layout = words[2], words[4], words[6]
    if mistake.file == adapter:
        variant = folder / "wrong.py"
        variant.write_text((ROOT / adapter).read_text().replace(mistake.old, mistake.new))
        return checkers(ROOT / adapter).check(chapter, layout, adapter=variant)
    copy = folder / "checkout"
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=IGNORED)
    with planted(mistake, copy):
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, *words, "--trace"], cwd=copy, env=environment, capture_output=True, text=True
        )
    line, found = ([each.strip() for each in run.stdout.splitlines()] + ["", ""])[:2]
    return Row(chapter, layout, line.partition(" ")[0], line, trace=found)


def faults(names: list[str]) -> int:
    """Print a row for each mistake. Returns the exit status: 1 if one is not placed."""
    placed, seconds = 0, list[float]()
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        checkers = functools.cache(lambda path: stack.enter_context(Checker(path, trace=True)))
        for name in names:
            began, mistake = time.monotonic(), MISTAKES[name]
            row = trace(mistake, checkers, Path(folder))
            seconds.append(time.monotonic() - began)
            is_placed = row.verdict == DIFFERS and re.search(mistake.place, row.trace) is not None
            placed += is_placed
            word = "placed" if is_placed else "elsewhere" if row.verdict == DIFFERS else row.verdict
            print(f"{word:9} {name:36} {mistake.thread:38} {seconds[-1]:5.1f} s  {row.trace or row.detail}", flush=True)
    print(f"{placed} of {len(names)} mistakes are placed, in {statistics.median(seconds):.1f} s each (median)")
    return int(placed < len(names))


def equal(layouts: list[str]) -> int:
    """Print what is traced in layouts that are equal. Returns the exit status: 1 if something is called wrong."""
    rows, wrong = 0, 0
    plan = {ROOT / ADAPTER: [f"run {layout}" for layout in layouts or LAYOUTS]}
    plan |= {} if layouts else {path_of(name): checks for name, checks in OTHERS.items()}
    for path, checks in plan.items():
        with Checker(path, trace=True) as checker:
            for check in checks:
                chapter, layout = check.split(" ", 1)
                row = checker.check(chapter, layout, last_step=2)
                rows += 1
                wrong += row.verdict != EQUAL or not re.fullmatch("traced: .* are equal", row.trace)
                print(f"{path.stem:12} {row}", flush=True)
    print(f"{rows} rows, of which {wrong} are called wrong or not traced")
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.trace_faults", description=__doc__.split("\n")[0])
    known = [name for name, mistake in MISTAKES.items() if mistake.place]
    parser.add_argument("--only", nargs="+", default=known, choices=known, metavar="NAME", help="mistakes")
    parser.add_argument("--equal", nargs="*", metavar="LAYOUT", help="trace layouts that are equal [the grid]")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    return faults(options.only) if options.equal is None else equal(options.equal)


if __name__ == "__main__":
    sys.exit(main())
