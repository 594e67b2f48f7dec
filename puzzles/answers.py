"""The learner's code: its start, and the sentence for what it raises. No torch here, see report.py."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from puzzles.report import Misuse, Report, Wrong

PUZZLE = "puzzle"  # name of the module with the learner's code


class NotOffered(Exception):
    """An adapter has no function with the name of a puzzle."""


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


def load_adapter(path: Path, name: str) -> Any:
    """Return the function with the name of a puzzle from a file, which may import from its own folder.

    Raises:
        NotOffered: the file has no such function.
    """
    sys.path.insert(0, str(path.resolve().parent))
    module = load(path)
    if not hasattr(module, name):
        raise NotOffered(f"{path.name} has no function {name}")
    return Adapted(getattr(module, name))


def judge(check: Callable[..., None], load: Callable[[], Any], group: Any, report: Report, path: Path) -> None:
    """Run a check, and fill in its report.

    Args:
        load: returns the learner's module.
        group: the ranks, for a check that needs several; otherwise None.
        path: the learner's file.
    """
    try:
        check(load(), group, report)
        if report.score is not None and not report.score.reached:
            report.verdict, report.sentence = "OVER PAR", "a correct answer, but not yet as good as par"
    except NotOffered as error:
        report.verdict, report.sentence = "NOT OFFERED", str(error)
    except Wrong as error:
        report.verdict, report.sentence = "WRONG", str(error)
    except BaseException as error:  # also SystemExit
        report.verdict, report.sentence = explain(error, path)
        report.picture = ""
        if report.case and report.verdict == "ERROR" and not isinstance(error, SyntaxError):
            report.sentence += f"; with {report.case}"
        several = group is not None and group.size > 1
        if several and report.verdict == "ERROR" and not isinstance(error, SyntaxError | Misuse):
            report.sentence = f"rank {group.rank} of {group.size}: {report.sentence}"


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
