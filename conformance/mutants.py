"""Plant each mistake of `mistakes` in a copy of the checkout, and report which check finds it first, and how fast.

    make mutants      or: python -m conformance.mutants --only NAME ... --room ROOM --out FILE.json

A check that a mistake names runs first; if it finds nothing, so do the fuzzer, the tests of the file's room and the
default run of conformance. So a mistake that is reported as found by nothing escapes all of them. Each check also runs
once without a mistake, because a test that fails anyway finds nothing.

    python -m conformance.mutants --page zero          the mistakes of a page, with the sentences of the checks
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from conformance.fuzz.cases import CASES, SEED
from conformance.mistakes import ADAPTER, MISTAKES, Mistake

ROOT = Path(__file__).resolve().parents[1]
IGNORED = shutil.ignore_patterns(".git", ".venv*", "runs", "site", "node_modules", "__pycache__", ".*_cache")
PYTEST = ["-m", "pytest", "-q", "-x", "-rf", "--tb=short", "-p", "no:cacheprovider"]
LIMIT = 1200.0  # seconds after which a check hangs
DEFAULT_RUN = "conformance"
EXAMPLES = [str(path.relative_to(ROOT)) for path in ROOT.glob("conformance/examples/*.py")]
times = itertools.count(2_000_000_000)  # of changed files, so that Python compiles each of them again


@dataclasses.dataclass
class Row:
    """The outcome of a mistake.

    Args:
        check: the check that finds it, "" if none does.
        seconds: time of this check.
        what: what the check says.
        missed: checks that ran before and found nothing.
    """

    name: str
    file: str
    check: str = ""
    seconds: float = 0.0
    what: str = ""
    missed: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        found = f"{self.check} ({self.seconds:.0f} s)" if self.check else "NOT FOUND"
        missed = f"; not by {', '.join(self.missed)}" if self.missed else ""
        return f"{self.name:40} {found}{missed}: {self.what}".rstrip(": ")


def command(check: str, mistake: Mistake | None = None) -> list[str]:
    """Return the arguments of Python that run a check."""
    if check == "fuzz":
        return ["-m", "conformance.fuzz", *f"--seed {SEED} --cases {CASES} --minutes 60 --stop".split()]
    if check.startswith("tests/"):
        return [*PYTEST, "-m", "" if "::" in check else "not slow", check]
    if check == DEFAULT_RUN:
        return ["-m", "conformance", ADAPTER]
    *adapters, chapter, layout = re.fullmatch(r"(?:(\S+\.py) )?(\S+) (.+)", check).groups()  # type: ignore[union-attr]
    own = mistake.file if mistake and mistake.file in EXAMPLES else ADAPTER
    return ["-m", "conformance", adapters[0] or own, "--only", chapter, "--layouts", layout]


def run(check: str, folder: Path, mistake: Mistake | None = None) -> tuple[bool, str]:
    """Run a check in a copy of the checkout. Returns whether it fails, and the line that says how."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as home:
        paths = {"PYTHONPATH": str(folder), "HOME": home, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        words = [sys.executable, *command(check, mistake)]
        process = subprocess.Popen(
            words, cwd=folder, env=os.environ | paths, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return True, f"hangs for {LIMIT:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if check.startswith("tests/") and code not in (0, 1, 2):  # pytest has found no such tests
        raise SystemExit(f"{check} cannot run: {lines[-1:]}")
    return code != 0, sentence(lines) if code else ""


def sentence(lines: list[str]) -> str:
    """Return the line of a check's output that says what differs, or the error of a test."""
    told = [line for line in lines if re.match(r"(differs|crashed|hangs) |case \d+ of seed", line)]
    errors = [line[1:].strip() for line in lines if re.match(r"E  +\S", line)]
    named = [line for line in errors if re.match(r"\S*Error\b", line)] or errors[:1]
    tests = [line.split(" - ")[0].removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
    return re.sub(" +", " ", " ".join(told[:1] or [*tests[:1], *named[-1:]] or lines[-1:]))


@contextlib.contextmanager
def planted(mistake: Mistake, folder: Path) -> Iterator[None]:
    """Make a mistake in a copy of the checkout, in a `with` block."""
    path = folder / mistake.file
    source = path.read_text()
    assert source.count(mistake.old) == 1, f"{mistake.file} has {mistake.old!r} {source.count(mistake.old)} times"

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, (time.time(), next(times)))

    write(source.replace(mistake.old, mistake.new))
    try:
        yield
    finally:
        write(source)


def room_of(file: str) -> str:
    """Return the tests of a file's room: a folder, or the file of the same name; "" if there are none."""
    parts = Path(file).with_suffix("").parts
    floor = f"tests/{parts[0]}"
    tests = f"{floor}/{parts[1]}" if len(parts) > 2 else f"{floor}/test_{parts[-1]}.py"
    return tests if (ROOT / tests).exists() else ""


def examine(name: str, folders: "queue.Queue[Path]", only_named: bool) -> Row:
    """Run checks until one finds a mistake."""
    mistake, row = MISTAKES[name], Row(name, MISTAKES[name].file)
    others = () if only_named else ("fuzz", room_of(mistake.file), DEFAULT_RUN)
    folder = folders.get()
    try:
        with planted(mistake, folder):
            for check in dict.fromkeys(filter(None, (*mistake.found_by, *others))):
                began = time.monotonic()
                is_found, what = run(check, folder, mistake)
                if is_found:
                    row.check, row.seconds, row.what = check, time.monotonic() - began, what
                    break
                row.missed.append(check)
    finally:
        folders.put(folder)
    print(row, flush=True)
    return row


def show(page: str, folder: Path) -> None:
    """Print the mistakes of a page, and what the last check of each says."""
    for name, mistake in MISTAKES.items():
        if mistake.page == page:
            with planted(mistake, folder):
                check = mistake.found_by[-1]
                is_found, what = run(check, folder, mistake)
            said = what.removeprefix(f"differs {check} ").split("; [")[0] if is_found else "finds nothing"
            print(f"{name}: {mistake.text}\n    {said if said.startswith(check) else f'{check}: {said}'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(MISTAKES), choices=MISTAKES, metavar="NAME", help="mistakes")
    parser.add_argument("--room", default="", help="mistakes in files of which this is a part of the path")
    parser.add_argument("--page", help="print the mistakes of a page")
    parser.add_argument("--named", action="store_true", help="run only the checks that a mistake names")
    parser.add_argument("--jobs", type=int, default=2, help="number of checks at a time [2]")
    parser.add_argument("--out", type=Path, help="JSON file to write the rows to")
    options = parser.parse_args()
    chosen = [name for name in options.only if options.room in MISTAKES[name].file]
    folders: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants") as scratch:
        for number in range(options.jobs):
            folders.put(Path(shutil.copytree(ROOT, Path(scratch, str(number)), ignore=IGNORED)))
        if options.page:
            show(options.page, folders.get())
            return 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda name: examine(name, folders, options.named), chosen))
            used = {(row.check, row.file if row.file in EXAMPLES else "") for row in rows if row.check}
            wrong = [
                check for check, fails in pool.map(lambda each: clean(each[0], each[1], folders), sorted(used)) if fails
            ]
    if options.out:
        options.out.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    missed = [row.name for row in rows if not row.check]
    print(f"{len(rows) - len(missed)} of {len(rows)} mistakes are found", *missed, sep="\n  not found: ")
    print(*wrong, sep="\n")
    return int(bool(missed or wrong))


def clean(check: str, adapter: str, folders: "queue.Queue[Path]") -> tuple[str, bool]:
    """Run a check without a mistake. Returns what it says, and whether it fails."""
    folder = folders.get()
    try:
        fails, what = run(check, folder, Mistake(adapter, "", "", ()))
    finally:
        folders.put(folder)
    return f"{check} fails without a mistake: {what}", fails


if __name__ == "__main__":
    sys.exit(main())
