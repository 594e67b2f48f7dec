"""Runs the check of a puzzle in processes that may fail or never end, and returns a report in one sentence."""

import contextlib
import faulthandler
import importlib
import linecache
import pickle
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from conformance.worker_pool import WorkerError, WorkerPool
from puzzles.catalogue import Puzzle
from puzzles.group import Group, Misuse
from puzzles.report import Report, Wrong

LIMIT, ADAPTER_LIMIT = 10.0, 60.0  # seconds for the learner's code, and for an adapter's, which may import much
PUZZLE = "puzzle"  # name of the module with the learner's code
MEMORY = 6 * 2**30  # bytes of a process, where a list that grows endlessly ends
START = 120.0  # seconds for the start of the processes
LAST = 2.0  # seconds after the limit in which all ranks write where they are, before any of them ends
CORRECT = ("RIGHT", "OVER PAR")
LOST = re.compile("gloo|[Cc]onnection (closed|reset|refused)|Broken pipe")  # errors of ranks whose peer has ended


class Failed(Exception):
    """Lets the pool stop the other ranks."""


class NotOffered(Exception):
    """An adapter has no function with the name of a puzzle."""


def run(puzzle: Puzzle, path: Path, pool: WorkerPool, limit: float | None = None, adapter: bool = False) -> Report:
    """Check a file with the learner's code.

    Args:
        path: the file.
        adapter: whether the file is an adapter, whose functions have the names of puzzles.
        pool: the processes, as many as the check asks for.
        limit: seconds after which the code counts as hanging; by default 10, or 60 for an adapter.
    """
    report, limit = Report(), limit or (ADAPTER_LIMIT if adapter else LIMIT)
    for ranks in getattr(check_of(puzzle), "SIZES", (1,)):
        with tempfile.TemporaryDirectory() as folder:
            failure = ""
            try:
                pool.run(run_rank, ranks, puzzle, path, Path(folder), limit, adapter, timeout=START + limit)
            except WorkerError as error:
                lines = str(error).strip().splitlines()
                failure = next((line for line in lines if "the worker died" in line), lines[-1])
            reports = [pickle.loads(file.read_bytes()) for file in sorted(Path(folder).glob("*.report"))]
            hangs = sorted(file for file in Path(folder).glob("*.hang") if file.stat().st_size)
            wrong = sorted((each for each in reports if each.verdict not in CORRECT), key=lambda each: each.verdict)
            causes = [each for each in wrong if not LOST.search(each.sentence)]
            if causes:  # an error of one rank is often the cause that another rank hangs, or loses its connection
                return causes[0]
            if hangs:
                return Report("HANGS", hanging(hangs, path, ranks, limit))
            if failure:
                return Report("ERROR", f"{path.name} has ended its process (os._exit, or out of memory): {failure}")
            report = reports[0]  # the last size is the one whose score the statement names
    return report


def check_of(puzzle: Puzzle) -> ModuleType:
    return importlib.import_module(f"puzzles.checks.{puzzle.name}")


def run_rank(puzzle: Puzzle, path: Path, folder: Path, limit: float, adapter: bool) -> None:
    """Run the check on one rank, and write its report to the folder, because a rank that hangs cannot return it.

    Raises:
        Failed: the report is not that of a correct answer.
    """
    group, report, module = Group(), Report(), check_of(puzzle)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with (
        (folder / f"{group.rank}.hang").open("w") as stacks,
        open(1, "w", buffering=1, closefd=False) as lines,  # so that what the code prints is seen if it never ends
        contextlib.redirect_stdout(lines),
    ):
        dist.barrier()  # a rank must not end while another one is connecting to it
        faulthandler.dump_traceback_later(limit, file=stacks)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even if it never returns to Python
        signal.setitimer(signal.ITIMER_REAL, limit + LAST)
        try:
            module.check(load_adapter(path, puzzle) if adapter else load(path), group, report)
            if report.score is not None and not report.score.reached:
                report.verdict, report.sentence = "OVER PAR", "a correct answer, but not yet as good as par"
        except NotOffered:
            report.verdict, report.sentence = "NOT OFFERED", f"{path.name} has no function {puzzle.name}"
        except Wrong as error:
            report.verdict, report.sentence = "WRONG", str(error)
        except BaseException as error:  # also SystemExit
            report.verdict, report.sentence = explain(error, path)
            report.picture = ""
            if report.case and report.verdict == "ERROR" and not isinstance(error, SyntaxError):
                report.sentence += f"; with {report.case}"
            if group.size > 1 and report.verdict == "ERROR" and not isinstance(error, SyntaxError | Misuse):
                report.sentence = f"rank {group.rank} of {group.size}: {report.sentence}"
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
    (folder / f"{group.rank}.report").write_bytes(pickle.dumps(report))
    if report.verdict not in CORRECT:
        if dist.is_initialized():  # a check may have replaced the group
            dist.destroy_process_group()
        raise Failed(report.sentence)


def load(path: Path) -> ModuleType:
    """Run the learner's file as a module."""
    module = ModuleType(PUZZLE)
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


class Adapted:
    """A function of an adapter, in place of the module of the puzzle that it answers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._function  # a check calls only one function, whose name differs from the puzzle's


def load_adapter(path: Path, puzzle: Puzzle) -> Any:
    """Return the function with a puzzle's name from a file, which may import from its own folder.

    Raises:
        NotOffered: the file has no such function.
    """
    sys.path.insert(0, str(path.resolve().parent))
    module = load(path)
    if not hasattr(module, puzzle.name):
        raise NotOffered
    return Adapted(getattr(module, puzzle.name))


def explain(error: BaseException, path: Path) -> tuple[str, str]:
    """Return the verdict and a sentence with the line of the learner's file from which an error comes."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return "ERROR", f"{path.name}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    message = (str(error).strip() or "no message").splitlines()[0]
    if not frames and isinstance(error, Misuse):
        return "ERROR", f"{path.name}: {message}"
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.obj.__name__ == PUZZLE:
        return "ERROR", f"{path.name} has no function {error.name}"
    if not frames:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(Path(last.filename).parts[-2:])}, line {last.lineno}"
        return "ERROR", f"the check cannot use the answer: {type(error).__name__}: {message} ({where})"
    if isinstance(error, NotImplementedError):
        return "NOT DONE YET", f"{path.name} still raises NotImplementedError in line {frames[-1].lineno}"
    name = "" if isinstance(error, Misuse) else f"{type(error).__name__}: "
    return "ERROR", f"{path.name}, line {frames[-1].lineno}, `{frames[-1].line}`: {name}{message}"


def hanging(files: list[Path], path: Path, ranks: int, limit: float) -> str:
    """Describe where the ranks were at the time limit, from the stacks that `faulthandler` has written."""
    places: dict[tuple[str, str], list[str]] = {}  # ranks by what they did, and where
    for file in files:
        stack = file.read_text()
        match = re.search(rf'File "{re.escape(str(path))}", line (\d+)', stack)
        inner = re.search(r'File "([^"]+)"', stack)
        waits = ranks > 1 and inner is not None and re.search("torch/distributed/|puzzles/group.py", inner[1])
        if match:
            place = f"in line {match[1]}, `{linecache.getline(str(path), int(match[1])).strip()}`"
        else:
            place = "for the other ranks to return" if waits else "in the check"
        places.setdefault(("wait" if waits else "are", place), []).append(file.stem)
    if ranks == 1:
        where = next(place for _, place in places)
    else:
        where = "; ".join(f"{doing(those, verb)} {place}" for (verb, place), those in places.items())
    return f"still running after {limit:g} s: {where}"


def doing(ranks: list[str], verb: str) -> str:
    """Return "rank 0 waits" or "ranks 0, 1 and 2 wait"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {'is' if verb == 'are' else verb + 's'}"
    return f"ranks {', '.join(ranks[:-1])} and {ranks[-1]} {verb}"
