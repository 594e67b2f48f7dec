"""Check of an adapter: write a case, start its ranks, compare what they return, and give a verdict."""

import dataclasses
import functools
import gc
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.case import AXES, PARTS, Case, sizes_of
from conformance.chapters import CHAPTERS, FOUR, MODELS, PAIRS, SINGLE, cases_of
from conformance.compare import LIMIT, Difference, compare
from conformance.export import check_export, read_weights
from conformance.models import FAMILIES
from conformance.precision import check_precision
from conformance.ranks import load_adapter
from conformance.reference import Reference, named_like, run_reference
from conformance.result import Result, first_line, read_outcome
from conformance.rounding import limits_of, limits_of_rotary
from conformance.trace import Trace
from conformance.trace_recorder import Record, Recorder

EQUAL, DIFFERS, NOT_OFFERED, CRASHED, HANGS = "equal", "differs", "not offered", "crashed", "hangs"
KNOWN = "known"  # a difference, a crash or a hang of which the adapter's KNOWN gives the reason
ROTARY = 1e-5  # largest error that the last bits of rotary tables can make
MOST = 10_000  # ranks, steps and other numbers of a case
LOST = re.compile("gloo|[Cc]onnection (closed|reset|refused)|Broken pipe|recvValue failed|client socket")


def message_of(text: str) -> str:
    """Return the message of an error, which follows the indented lines of its last traceback, in one line."""
    lines = text.rpartition("Traceback (most recent call last):")[2].strip("\n").splitlines()
    message = itertools.dropwhile(lambda line: line[:1] == " ", lines)
    return " ".join(" ".join(message).split())[:300]


def outcome_of(path: Path) -> tuple[str, Any]:
    """Read the outcome of a rank. One that cannot be read is a crash."""
    try:
        return read_outcome(path)
    except Exception as error:
        return CRASHED, f"{path.name} cannot be read: {first_line(error)}"


@dataclasses.dataclass
class Row:
    """The verdict of a chapter in a layout.

    Args:
        verdict: one of the six names above.
        detail: the first difference, the reason, or the error.
        errors: largest relative error of each kind of result.
        seconds: time of the case.
        difference: fields of the first difference, for programs.
        log: tracebacks of the ranks.
        trace: the first wrong tensor, the number of tensors that are equal, or why none was compared; "" without trace.
        wrong: fields of the first wrong tensor, for programs.
    """

    chapter: str
    layout: str
    verdict: str = EQUAL
    detail: str = ""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    difference: dict[str, Any] = dataclasses.field(default_factory=dict)
    log: str = ""
    trace: str = ""
    wrong: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        return self.verdict in (DIFFERS, CRASHED, HANGS)

    def __str__(self) -> str:
        error = f"{max(self.errors.values()):.0e} " if self.errors and self.verdict == EQUAL else ""
        trace = f"\n{'':11} {self.trace}" if self.trace else ""
        return f"{self.verdict:11} {self.chapter:12} {self.layout:12} {error}{self.detail}".rstrip() + trace


@functools.cache
def server() -> subprocess.Popen[str]:
    """Start the process that starts the ranks of all cases. It ends with this process, which closes its input."""
    command = [sys.executable, "-m", "conformance.ranks"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Checker:
    """Checks an adapter.

    Args:
        path: the adapter's file; None: only `judge_cases`.
        timeout: seconds after which a case hangs.
        trace: whether to look for the first wrong tensor of each case, see `Trace`; None: of the first that differs.
        seed: seed of the weights and the batches of all cases.
    """

    def __init__(self, path: Path | None, timeout: float = 60.0, trace: bool | None = False, seed: int = 0) -> None:
        self.path, self.timeout, self.trace, self.seed = path, timeout, trace, seed
        self.adapter = ModuleType("none") if path is None else load_adapter(path)
        self.lacks: tuple[str, ...] = getattr(self.adapter, "LACKS", ())
        if unknown := {*self.lacks} - {*PARTS}:
            raise SystemExit(f"LACKS has {min(unknown)!r}, which is none of {', '.join(PARTS)}")
        self.config: dict[str, Any] = getattr(self.adapter, "CONFIG", {})
        self.has_other_tables = False  # whether the row's first loss shows it
        self.parts: list[tuple[Case, list[Result]]] = []  # of the row: its cases so far, and their results
        self.known: dict[tuple[bytes, Case], tuple[Reference, Any]] = {}
        self.records: dict[tuple[bytes, Case], list[Record]] = {}  # of the last reference

    def plan(
        self, only: Iterable[str] = CHAPTERS, layouts: Sequence[str] = (), full: bool = False
    ) -> Iterator[tuple[str, str, str]]:
        """Yield the rows of a run: chapter, layout, and another layout to resume in."""
        for chapter in only:
            own = getattr(self.adapter, "LAYOUTS", ())
            default = [*FOUR, *PAIRS, *MODELS, *own] if chapter == "run" else [*SINGLE]
            if chapter == "mixed":  # gradients are sums over micro-batches only, over ranks only, and over both
                default = ["dp1", "dp2 no_accumulation", *SINGLE]
            default = [*dict.fromkeys([*SINGLE, *default, *PAIRS, *own])] if full else default
            offered = [layout for layout in layouts or default if not self.refusal(chapter, layout, layout)]
            others = itertools.chain(offered[1:], offered) if len(set(offered)) > 1 else itertools.repeat("dp1")
            for layout in layouts or offered:
                yield chapter, layout, next(others) if layout in offered else layout

    def refusal(self, chapter: str, layout: str, other: str) -> str:
        """Return why the adapter offers no such row, by its lists CHAPTERS and AXES; "" if it does."""
        if chapter not in getattr(self.adapter, "CHAPTERS", (chapter,)):
            return f"the adapter has no {chapter}"
        missing = self.without_axes(layout) or (self.without_axes(other) if chapter == "run" else [])
        missing = missing or [part for part in self.lacks if part in layout.split()]
        if self.config and any(word in FAMILIES for word in layout.split()):
            return "the adapter has a config of its own"
        return f"the adapter has no {' and no '.join(missing)}" if missing else ""

    def without_axes(self, layout: str) -> list[str]:
        """Return the axes of a layout that the adapter does not offer."""
        axes = getattr(self.adapter, "AXES", AXES)
        return [axis for axis, size in sizes_of(layout).items() if size > 1 and axis not in axes]

    def check(self, chapter: str, layout: str, other: str = "dp1", adapter: Path | None = None, **changes: Any) -> Row:
        """Check a chapter in a layout.

        Args:
            adapter: a variant of the adapter, to check instead.
            other, changes: see `cases_of`.
        """
        row, began = Row(chapter, layout), time.monotonic()
        if reason := self.refusal(chapter, layout, other):
            return dataclasses.replace(row, verdict=NOT_OFFERED, detail=reason)
        with tempfile.TemporaryDirectory() as folder:
            cases = cases_of(chapter, layout, other, Path(folder), self.lacks, self.seed, self.config, **changes)
            for case in cases:
                if self.trace and not why_untraced(case):
                    (case.folder / "trace").mkdir()
                self.start(case, adapter)
                self.judge(case, row, cases)
                if row.verdict not in (EQUAL, KNOWN):
                    break
        self.compare_with_known(row)
        if row.verdict == EQUAL and (left_out := [part for part in CHAPTERS[chapter].parts if part in self.lacks]):
            row.detail = "; ".join(filter(None, (row.detail, f"without {', '.join(left_out)}")))
        if row.verdict == DIFFERS and self.trace is None and not why_untraced(case):
            self.trace = True
            again = self.check(chapter, layout, other, adapter, **changes)
            self.trace, row.trace, row.wrong = False, again.trace, again.wrong
        row.seconds = time.monotonic() - began
        gc.collect()  # the modules of a trace are in circles
        return row

    def limits_of_known(self, row: Row) -> tuple[str, dict[str, Any]]:
        """Return the reason of a row's known difference, and what it may be: the largest error by the names of
        `Difference.what`, or for `crashed` and `hangs` a text that the detail has.
        """
        found: Any = getattr(self.adapter, "KNOWN", {}).get((row.chapter, row.layout), ("", {}))
        if not (isinstance(found, tuple) and [*map(type, found)] == [str, dict]):
            raise SystemExit(f"KNOWN has {found!r} for {row.chapter} {row.layout}; write a reason and what may differ")
        return found

    def compare_with_known(self, row: Row) -> None:
        """Change the verdict of a row whose crash or hang the adapter knows, or whose difference has gone."""
        reason, most = self.limits_of_known(row)
        if reason and row.verdict in (CRASHED, HANGS) and most.get(row.verdict, "\0") in row.detail:
            row.verdict, row.detail = KNOWN, f"{reason}: {row.detail}"
        elif reason and row.verdict == EQUAL:
            row.detail = f"is equal now; remove it from KNOWN ({reason})"

    def write_cases(self, rows: Iterable[tuple[str, str, str]], folder: Path) -> Iterator[Case]:
        """Write the cases of rows into a folder that can be copied to another machine, and yield them."""
        for number, row in enumerate(row for row in rows if not self.refusal(*row)):
            with tempfile.TemporaryDirectory() as scratch:
                cases = cases_of(*row, Path(scratch), self.lacks, self.seed, self.config)
                target = folder / f"{number:03} {row[0]} {row[1]}".replace(" ", "_")
                shutil.copytree(scratch, target)  # with files in place of links
                yield from (dataclasses.replace(case, folder=target / case.folder.name) for case in cases)

    def judge_cases(self, folder: Path) -> Iterator[Row]:
        """Judge what ranks have written into a folder of `write_cases`."""
        for each in sorted(folder.glob("*/1")):
            row = Row(each.parent.name, "")
            try:
                self.judge_folder(each.parent, row)
            except Exception as error:  # of files that others have written, or damaged
                row.verdict, row.detail = CRASHED, f"{each.parent.name} cannot be judged: {first_line(error)}"
            yield row

    def judge_folder(self, folder: Path, row: Row) -> None:
        for path in folder.rglob("*"):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path.relative_to(folder)} is neither a file nor a folder")
        cases = [Case.read(path) for path in sorted(folder.iterdir()) if path.is_dir()]
        row.chapter, row.layout = cases[0].chapter, cases[0].layout
        for case in cases:
            if max(case.world_size, case.micro_batches, case.last_step, case.total_steps, case.new_tokens) > MOST:
                raise ValueError("case.json has other numbers than were written")
            if row.verdict in (EQUAL, KNOWN):
                self.judge(case, row, cases)
        self.compare_with_known(row)

    def start(self, case: Case, adapter: Path | None = None) -> None:
        """Run the ranks of a case. Their outcomes are files in its folder."""
        pipes = server()
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        print(json.dumps([str(adapter or self.path), str(case.folder), self.timeout]), file=pipes.stdin, flush=True)
        reply = pipes.stdout.readline()  # waits
        assert reply == "done\n"

    def judge(self, case: Case, row: Row, cases: Sequence[Case]) -> None:
        """Read the outcomes of the ranks of one of a row's cases, and compare them with the reference."""
        paths = {rank: case.folder / f"rank{rank}.safetensors" for rank in range(case.world_size)}
        outcomes = {rank: outcome_of(path) for rank, path in paths.items() if path.exists()}
        found = [outcome for outcome in outcomes.values() if outcome[0] == NOT_OFFERED]
        failures = {rank: text for rank, (kind, text) in outcomes.items() if kind == CRASHED}
        missing = [rank for rank in range(case.world_size) if rank not in outcomes]
        row.log = "".join(f"rank {rank}: {text}" for rank, text in failures.items())
        errors = {rank: message_of(text) for rank, text in failures.items()}
        if found:
            row.verdict, row.detail = found[0]
        elif failures and not (missing and all(map(LOST.search, errors.values()))):  # which only lost the missing ones
            rank = min(errors, key=lambda rank: (bool(LOST.search(errors[rank])), rank))  # others only lost this rank
            row.verdict, row.detail = CRASHED, f"rank {rank}: {errors[rank]}"
        elif missing:
            row.verdict, row.detail = HANGS, "; ".join(self.place(case, rank) for rank in missing)
            logs = {rank: path for rank in missing if (path := case.folder / f"rank{rank}.log").exists()}
            row.log = "".join(f"rank {rank}: {path.read_text(errors='replace')[-2000:]}" for rank, path in logs.items())
        else:
            results: list[Result] = [outcome[1] for outcome in outcomes.values()]
            names = {name for each in results for tensors in (*each.gradients, each.weights) for name in tensors}
            right, limits = self.reference(cases, names)
            right = right.of(case)
            difference = None
            try:
                difference = self.compare(case, cases, results, row, right, limits)
            except Exception as error:  # results of any kind, or a model folder that transformers cannot load
                row.verdict, row.detail = DIFFERS, f"the results cannot be compared: {first_line(error)}"
            if self.trace:
                if not (reason := why_untraced(case)):
                    row.trace, row.wrong = self.traced(case, cases[-1], results, right, difference)
                elif not row.trace:
                    row.trace = f"not traced: {reason}"
        if case.layout != row.layout and row.verdict not in (EQUAL, KNOWN):
            row.detail = f"resumed in {case.layout}: {row.detail}"

    def place(self, case: Case, rank: int) -> str:
        """Say where a rank that has not returned is, or that it has ended."""
        path = case.folder / f"rank{rank}.stack"
        stack = path.read_text(errors="replace") if path.exists() else None  # None: under another launcher
        if stack == "":
            return f"rank {rank} has ended its process"
        found = re.search(rf'File "{re.escape(str(self.path))}", line (\d+)', stack or "")
        return f"rank {rank} " + (
            f"is in line {found[1]} of {Path(str(self.path)).name}" if found else "has not returned"
        )

    def compare(
        self, case: Case, cases: Sequence[Case], results: list[Result], row: Row, right: Reference, limits: Any
    ) -> Difference | None:
        if not any(each.weights for each in results) and (case.output / "config.json").exists():
            results = [dataclasses.replace(results[0], weights=read_weights(case)[0].weights), *results[1:]]
        errors, difference = compare(results, right, case.first_step, limits)
        reason, most = self.limits_of_known(row)
        # Before any update, few other mistakes change the last bits of the loss.
        if right.losses and not case.first_step:
            errors_of_first = [abs(each.losses[0] / right.losses[0] - 1) for each in results if len(each.losses)]
            self.has_other_tables = max(errors_of_first, default=0.0) > 1e-3 * LIMIT
        if difference is not None and limits is None and difference.error < ROTARY and self.has_other_tables:
            nudged = limits_of_rotary(case, self.reference(cases, ())[0])
            if compare(results, right, case.first_step, nudged)[1] is None:
                row.detail, difference = f"but for float32 rotary tables: {difference}", None
        if difference is not None and reason:
            first = difference
            errors, difference = compare(results, right, case.first_step, limits, most)
            if difference is None:
                row.verdict, row.detail = KNOWN, f"{reason}: {first}"
        if limits is not None and (difference is None or math.isfinite(difference.error)):
            self.parts = [*(self.parts if case.first_step else ()), (case, results)]
            found = check_precision(self.parts, right, limits)
            is_known = found is not None and found.error <= most.get(found.what, 0.0)
            difference = difference if is_known else found or difference
        if difference is None and case.exports:
            difference = check_export(case, right)
        row.errors = {kind: max(error, row.errors.get(kind, 0.0)) for kind, error in errors.items()}
        if difference is not None:
            row.verdict, row.detail, row.difference = DIFFERS, str(difference), dataclasses.asdict(difference)
        return difference

    def traced(
        self, case: Case, last: Case, results: list[Result], right: Reference, difference: Difference | None
    ) -> tuple[str, dict[str, Any]]:
        """Say which tensor of a case is the first wrong one, also as fields, or how many are equal: a run of which none
        is compared proves nothing.
        """
        try:
            trace = Trace(case, self.records_of(last), right, results, getattr(self.adapter, "module_name", str))
            text = trace.first_wrong(difference)
        except Exception as error:  # a trainer's modules can return anything, and it can have no float64
            return f"not traced: its records cannot be compared: {type(error).__name__}: {error}", {}
        equal = [each for found in trace.at.values() for each in found if each.is_right]
        if not trace.reason and (equal or any(map(trace.names_of, trace.raw))):
            reached = {name for each in equal for name in each.key[2].split(" + ")} & trace.modules
            counts = f"{len(equal)} tensors of {len(reached)} of {len(trace.modules)} modules are equal"
            if difference is None:  # a tensor can have another form, and all results can be right
                return f"traced: {counts}" + (f", but {text}" if text else ""), {}
            return text or f"traced: {counts}", trace.first
        names = ", ".join(sorted(trace.raw)[:3])
        unknown = f"no module has a name of transformers' model ({names}); see `module_name`"
        return f"not traced: {trace.reason or (unknown if names else 'no module was called')}", {}

    def reference(self, cases: Sequence[Case], names: Collection[str]) -> tuple[Reference, Any]:
        """Return the reference of a row's cases, and the limits of its dtype, from those of an earlier layout if
        possible.

        Args:
            names: names of the tensors that the ranks returned, see `named_like`.
        """
        key = self.key(cases[-1])
        if key not in self.known:
            right = named_like(run_reference(cases[-1]), names)
            self.known[key] = right, None if cases[-1].dtype == "float64" else limits_of(cases, right)
        return self.known[key]

    def records_of(self, case: Case) -> list[Record]:
        """Return the records of a second run of the reference, which are those of an earlier layout if possible."""
        key = self.key(case)
        if key not in self.records:
            with Recorder() as recorder:
                run_reference(case)
            self.records = {key: recorder.records}
        return self.records[key]

    def key(self, case: Case) -> tuple[bytes, Case]:
        """Return what the reference of a case depends on."""
        files = case.model_folder / "config.json", case.folder / "batches.safetensors"
        contents = b"".join(path.read_bytes() for path in files)
        return contents, dataclasses.replace(case, layout="", folder=Path(), load=None, micro_batches=1)


def why_untraced(case: Case) -> str:
    """Return why a case cannot be traced; "" if it can."""
    if not case.steps:
        return "it takes no step"
    return "" if case.dtype == "float64" else "only float64 is"
