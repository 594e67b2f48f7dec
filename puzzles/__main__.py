"""Lists the puzzles, checks an answer, prints hints and solutions:

    python -m puzzles               all puzzles, and which are solved
    python -m puzzles 7             check puzzles/p07_*.py
    python -m puzzles 7 --hint      the next of three hints
    python -m puzzles 7 --solution  a solution
    python -m puzzles --adapter course.py    check functions of another package: all that the file offers

Some puzzles have a score; lower is better. An answer is RIGHT if its score is at most par; best known is the best that
we have found. Pictures of the answers, and which puzzles are solved, are in runs/puzzles/.

An adapter is a Python file whose functions are named as the puzzles' files, with the arguments and results of these:
`from ring import my_all_reduce as p02_ring`. With a number, too, it prints the whole result of one puzzle.
"""

import argparse
import json
import multiprocessing
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picotron.console import UserError
from puzzles.catalogue import PUZZLES, Puzzle, find
from workbench.console import print_line, text_table
from workbench.files import read_object, write_atomically
from workbench.run.start_method import START_METHOD

if TYPE_CHECKING:
    from puzzles.report import Report

OUTPUT = Path("runs/puzzles")


def read_progress(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what is known about each puzzle, by its name: hints (number shown), solved, score and its text."""
    try:
        progress = read_object(folder / "progress.json")
    except UserError:  # not started yet, or damaged, which loses no answers
        progress = {}
    known = {name: value for name, value in progress.items() if isinstance(value, dict)}
    return {puzzle.name: {"hints": 0, "solved": False} | known.get(puzzle.name, {}) for puzzle in PUZZLES}


def write_progress(folder: Path, progress: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "progress.json", json.dumps(progress, indent=2))


def list_puzzles(folder: Path) -> None:
    progress, table = read_progress(folder), [["", "topic", "level", "puzzle", "to read", ""]]
    for puzzle in PUZZLES:
        known = progress[puzzle.name]
        state = f"solved  {known.get('text', '')}".strip() if known["solved"] else ""
        page = puzzle.page.partition("#")[0]
        table.append([str(puzzle.number), puzzle.topic, puzzle.level, puzzle.title, page, state])
    print_line(text_table(table))
    print_line(
        "\nSome puzzles have a score; lower is better. An answer is RIGHT if its score is at most par;\n"
        "best known is the best that we have found.\n"
        f"{sum(each['solved'] for each in progress.values())} of {len(PUZZLES)} solved. "
        "Edit a file puzzles/p*.py, and check it with: python -m puzzles NUMBER"
    )


def check(puzzles: Sequence[Puzzle], adapter: Path | None) -> list["Report"]:
    """Check the learner's answers, or the functions of an adapter."""
    from conformance.worker_pool import WorkerPool  # imports torch

    # Forked processes start without importing torch again. (A fork after torch has computed could hang; it has not.)
    pool = WorkerPool(context=multiprocessing.get_context(START_METHOD))
    from puzzles.harness import run

    found = [run(puzzle, adapter or puzzle.path, pool, adapter=adapter is not None) for puzzle in puzzles]
    pool.close()
    return found


def show(puzzle: Puzzle, report: "Report", folder: Path) -> None:
    """Print the result of a check, and write its files."""
    print_line(f"{report.verdict}: puzzle {puzzle.number}, {puzzle.title}")
    for line in filter(None, (report.sentence, f"score: {report.score}" if report.score else "")):
        print_line(line)
    files = {f"{puzzle.name}.svg": report.picture} | report.files if report.picture else report.files
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(folder / name, text)
    if files:
        print_line(f"see {' and '.join(str(folder / name) for name in files)}")


def remember(puzzle: Puzzle, report: "Report", folder: Path) -> None:
    """Note that an answer is right, and print what to read and to solve next; or how to get a hint."""
    progress = read_progress(folder)
    known = progress[puzzle.name]
    if report.verdict == "RIGHT":
        print_line(f"in picotron: {puzzle.place}")
        if report.score and report.score.value <= known.get("score", report.score.value):
            known |= {"score": report.score.value, "text": report.score.text}
        known["solved"] = True
        write_progress(folder, progress)
        place = PUZZLES.index(puzzle)
        others = PUZZLES[place + 1 :] + PUZZLES[:place]
        following = next((each for each in others if not progress[each.name]["solved"]), None)
        to_read = following and f"next: puzzles/{following.path.name}, after {following.page.partition('#')[0]}"
        print_line(to_read or "You have solved all puzzles.")
    elif known["hints"] < len(puzzle.hints):
        print_line(f"for a hint: python -m puzzles {puzzle.number} --hint")


def check_adapter(adapter: Path) -> bool:
    """Check all functions of an adapter, and print a row for each puzzle. Returns whether it offers a function, and all
    that it offers are right.
    """
    reports = dict(zip(PUZZLES, check(PUZZLES, adapter), strict=True))
    print_line(text_table([["", "function", "verdict", "score"], *([
        str(puzzle.number), puzzle.name, report.verdict.lower(), report.score.text if report.score else ""
    ] for puzzle, report in reports.items())]))  # fmt: skip
    offered = {puzzle: report for puzzle, report in reports.items() if report.verdict != "NOT OFFERED"}
    wrong = {puzzle: report for puzzle, report in offered.items() if report.verdict != "RIGHT"}
    print_line(f"\n{len(offered) - len(wrong)} of {len(offered)} offered functions are right.")
    for puzzle, report in wrong.items():
        print_line(f"{puzzle.name}: {report.sentence}")
    return bool(offered) and not wrong


def hint(puzzle: Puzzle, folder: Path) -> None:
    """Print the hints that were printed before, and the next one."""
    progress = read_progress(folder)
    count = progress[puzzle.name]["hints"] = min(progress[puzzle.name]["hints"] + 1, len(puzzle.hints))
    write_progress(folder, progress)
    for number, text in enumerate(puzzle.hints[:count], start=1):
        print_line(textwrap.fill(f"hint {number} of {len(puzzle.hints)}: {text}", 100))
    print_line(f"to read: {puzzle.page}")


def main(arguments: list[str] | None = None, folder: Path = OUTPUT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m puzzles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("puzzle", nargs="?", help="number of a puzzle [list all puzzles]")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--hint", action="store_true", help="print one more hint")
    what.add_argument("--solution", action="store_true", help="print a solution")
    what.add_argument(
        "--adapter", type=Path, metavar="FILE", help="check the functions of this file instead, see above"
    )
    options = parser.parse_args(arguments)
    if options.adapter is not None and not options.adapter.is_file():
        parser.error(f"there is no file {options.adapter}")
    if options.puzzle is None:
        if options.hint or options.solution:
            parser.error("name a puzzle, such as: python -m puzzles 7 --hint")
        if options.adapter:
            return int(not check_adapter(options.adapter))
        list_puzzles(folder)
        return 0
    puzzle = find(options.puzzle)
    if puzzle is None:
        parser.error(f"there is no puzzle {options.puzzle!r}; choose a number from 1 to {len(PUZZLES)}")
    if options.hint:
        hint(puzzle, folder)
    elif options.solution:
        print_line(puzzle.solution.read_text(), end="")
    elif not (options.adapter or puzzle.path).exists():
        parser.error(f"there is no {puzzle.path}; restore it with: git checkout -- {puzzle.path}")
    else:
        (report,) = check([puzzle], options.adapter)
        show(puzzle, report, folder)
        if not options.adapter:
            remember(puzzle, report, folder)
        return int(report.verdict != "RIGHT")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        remedy = "run `make setup`, and activate the environment: source .venv/bin/activate"
        sys.exit(f"error: {error.name} is not installed here; {remedy}")
    except OSError as error:
        if not error.filename:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}; work in a clone of this repository that you may write to")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
