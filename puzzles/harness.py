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
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from conformance.worker_pool import WorkerError, WorkerPool
from puzzles.answers import judge, load, load_adapter
from puzzles.catalogue import FOLDER, Puzzle
from puzzles.group import Group
from puzzles.report import Report

LIMIT, ADAPTER_LIMIT = 10.0, 60.0  # seconds for the learner's code, and for an adapter's, which may import much
MEMORY = 6 * 2**30  # bytes of a process, where a list that grows endlessly ends
START = 120.0  # seconds for the start of the processes
LAST = 2.0  # seconds after the limit in which all ranks write where they are, before any of them ends
CORRECT = ("RIGHT", "OVER PAR")
LOST = re.compile("gloo|[Cc]onnection (closed|reset|refused)|Broken pipe")  # errors of ranks whose peer has ended


class Failed(Exception):
    """Lets the pool stop the other ranks."""


def run(puzzle: Puzzle, path: Path, pool: WorkerPool, limit: float | None = None, adapter: bool = False) -> Report:
    """Check a file with the learner's code.

    Args:
        path: the file.
        adapter: whether the file is an adapter, whose functions have the names of puzzles.
        pool: the processes, as many as the check asks for.
        limit: seconds after which the code counts as hanging; by default 10, or 60 for an adapter.
    """
    path, report, limit = path.resolve(), Report(), limit or (ADAPTER_LIMIT if adapter else LIMIT)
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
    group, report = Group(), Report()
    if sys.platform == "linux":  # other systems accept no such limit, or ignore it
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with (
        (folder / f"{group.rank}.hang").open("w") as stacks,
        open(1, "w", buffering=1, closefd=False) as lines,  # so that what the code prints is seen if it never ends
        contextlib.redirect_stdout(lines),
        contextlib.chdir(FOLDER.parent),  # checks read files of the repository, from whatever folder they are run
    ):
        dist.barrier()  # a rank must not end while another one is connecting to it
        faulthandler.dump_traceback_later(limit, file=stacks)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even if it never returns to Python
        signal.setitimer(signal.ITIMER_REAL, limit + LAST)
        try:
            answer = partial(load_adapter, path, puzzle.name) if adapter else partial(load, path)
            judge(check_of(puzzle).check, answer, group, report, path)
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
    (folder / f"{group.rank}.report").write_bytes(pickle.dumps(report))
    if report.verdict not in CORRECT:
        if dist.is_initialized():  # a check may have replaced the group
            dist.destroy_process_group()
        raise Failed(report.sentence)


def hanging(files: list[Path], path: Path, ranks: int, limit: float) -> str:
    """Describe where the ranks were at the time limit, from the stacks that `faulthandler` has written."""
    places = defaultdict[str, list[str]](list)  # ranks by where they were
    for file in files:
        stack = file.read_text()
        match = re.search(rf'File "{re.escape(str(path))}", line (\d+)', stack)
        inner = re.search(r'File "([^"]+)"', stack)
        waits = ranks > 1 and inner is not None and re.search("torch/distributed/|puzzles/group.py", inner[1])
        line = match and f"in line {match[1]}, `{linecache.getline(str(path), int(match[1])).strip()}`"
        place = line or ("for the other ranks to return" if waits else "in the check")
        places[("waits " if waits else "") + place].append(file.stem)
    where = [place if ranks == 1 else f"rank {', '.join(stuck)}: {place}" for place, stuck in places.items()]
    return f"still running after {limit:g} s: {'; '.join(where)}"
