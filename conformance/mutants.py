"""Plant each mistake of `mistakes` in a copy of the checkout, and report which check finds it first, and how fast.

    make mutants      or: python -m conformance.mutants --only NAME ... --room ROOM

A check that a mistake names runs first; if it finds nothing, so do the fuzzer, the tests of the file's room and the
default run of conformance. So a mistake that is reported as found by nothing escapes all of them. Each check also runs
once without a mistake, because a test that fails anyway finds nothing.

    python -m conformance.mutants --page zero          the mistakes of a page, with the sentences of the checks
    python -m conformance.mutants --reported           those of public trackers: is the first wrong tensor named?
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from conformance.mistakes import MISTAKES, SHOWN, Mistake

ROOT = Path(__file__).resolve().parents[1]
IGNORED = shutil.ignore_patterns(".git", ".venv*", "runs", "site", "node_modules", "__pycache__", ".*_cache")
PYTEST = ["-m", "pytest", "-q", "-x", "-rf", "--tb=short", "-p", "no:cacheprovider"]
LIMIT = 1200.0  # seconds after which a check hangs
DEFAULT_RUN, ADAPTER = "conformance", "conformance/adapters/picotron.py"
times = itertools.count(2_000_000_000)  # of changed files, so that Python compiles each of them again


class Outcome(NamedTuple):
    """Whether a check fails, the line that says how, and the line of the trace."""

    fails: bool
    said: str
    trace: str = ""


def adapter_of(file: str) -> str:
    return file if file.startswith(("conformance/examples/", "conformance/adapters/")) else ADAPTER


def command(check: str, file: str) -> list[str]:
    """Return the arguments of Python that run a check of a file."""
    if check == "fuzz":
        check = "test_fuzz"  # corners, and the first random cases
    if check == DEFAULT_RUN:
        return ["-m", "conformance", ADAPTER]
    if check.startswith("test"):
        name, colons, test = check.partition("::")
        path = next(ROOT.glob(f"tests/**/{name}.py"), ROOT / name).relative_to(ROOT)
        return [*PYTEST, "-m", "" if test else "not slow", f"{path}{colons}{test}"]
    *adapters, chapter, layout = re.fullmatch(r"(?:(\S+\.py) )?(\S+) (.+)", check).groups()  # type: ignore[union-attr]
    return ["-m", "conformance", adapters[0] or adapter_of(file), "--only", chapter, "--layouts", layout]


def run(check: str, folder: Path, file: str) -> Outcome:
    """Run a check of a file in a copy of the checkout."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as home:
        paths = {"PYTHONPATH": str(folder), "HOME": home, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        words = [sys.executable, *command(check, file)]
        process = subprocess.Popen(
            words, cwd=folder, env=os.environ | paths, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return Outcome(True, f"hangs for {LIMIT:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if check.startswith("test") and code not in (0, 1, 2):  # pytest has found no such tests
        raise SystemExit(f"{check} cannot run: {lines[-1:]}")
    trace = next((line.strip() for line in lines if re.match(r" +(step|traced|not traced)\b", line)), "")
    return Outcome(code != 0, sentence(lines), trace)


def sentence(lines: list[str]) -> str:
    """Return the line of a check's output that says what differs, or the error of a test."""
    told = [line for line in lines if re.match(r"(differs|crashed|hangs) ", line)]
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


def examine(name: str, folder: Path, options: argparse.Namespace) -> tuple[str, str]:
    """Run checks in a copy of the checkout until one finds a mistake, and names its place if it has one.

    Returns:
        The check, or "" if there is none, and what to print.
    """
    mistake, missed = MISTAKES[name], list[str]()
    named = mistake.found_by[::-1] if options.page or mistake.place else mistake.found_by  # the last one says most
    others = () if options.named else ("fuzz", room_of(mistake.file), DEFAULT_RUN)
    with planted(mistake, folder):
        for check in dict.fromkeys(filter(None, (*named, *others))):
            began = time.monotonic()
            fails, said, trace = run(check, folder, mistake.file)
            is_found = fails and re.search(mistake.place, trace) is not None
            if is_found and options.page:
                said = said.removeprefix(f"differs {check} ").split("; [")[0]
                said = said if said.startswith(check) else f"{check}: {said}"
                return check, f"{name}: {SHOWN[options.page][name]}\n    {said}"
            if is_found:
                before = f"; not by {', '.join(missed)}" if missed else ""
                place = f"; {mistake.thread}: {trace}" if mistake.place else ""
                return check, f"{name:40} {check} ({time.monotonic() - began:.0f} s){before}: {said}{place}"
            missed.append(f"{check}, which says {trace or said!r}" if fails else check)
    return "", f"{name:40} NOT FOUND; not by {', '.join(missed)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(MISTAKES), choices=MISTAKES, metavar="NAME", help="mistakes")
    parser.add_argument("--room", default="", help="mistakes in files of which this is a part of the path")
    parser.add_argument("--page", choices=SHOWN, help="print the mistakes of a page")
    parser.add_argument(
        "--reported", action="store_true", help="mistakes of which a trace names the first wrong tensor"
    )
    parser.add_argument("--named", action="store_true", help="run only the checks that a mistake names")
    parser.add_argument("--jobs", type=int, default=2, help="number of checks at a time [2]")
    options = parser.parse_args()
    names = SHOWN[options.page] if options.page else options.only
    chosen = [name for name in names if options.room in MISTAKES[name].file]
    chosen = [name for name in chosen if all(MISTAKES[name][-2:]) or not options.reported]
    own, found = threading.local(), dict[str, str]()  # a thread's copy of the checkout; the check that finds a mistake
    with tempfile.TemporaryDirectory(prefix="mutants") as scratch:

        def copy() -> None:
            own.folder = shutil.copytree(ROOT, Path(scratch, str(threading.get_ident())), ignore=IGNORED)

        with concurrent.futures.ThreadPoolExecutor(options.jobs, initializer=copy) as pool:
            rows = pool.map(lambda name: examine(name, own.folder, options), chosen)
            for name, (check, text) in zip(chosen, rows, strict=True):
                found[name] = check
                print(text, flush=True)
            if options.page:
                return 0
            used = sorted({(check, adapter_of(MISTAKES[name].file)) for name, check in found.items() if check})
            outcomes = list(pool.map(lambda each: run(each[0], own.folder, each[1]), used))
    missed = [name for name, check in found.items() if not check]
    print(f"{len(found) - len(missed)} of {len(found)} mistakes are found", *missed, sep="\n  not found: ")
    wrong = [each for each in zip(used, outcomes, strict=True) if each[1].fails]
    print(*(f"{check} fails without a mistake: {outcome.said}" for (check, _), outcome in wrong), sep="\n")
    return int(bool(missed or wrong))


if __name__ == "__main__":
    sys.exit(main())
