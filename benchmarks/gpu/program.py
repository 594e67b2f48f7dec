"""Check and measure picotron on this machine's GPUs, and write the results into docs/reference/gpu.md:

    make gpu    or: python -m benchmarks.gpu [--only SECTION ...] [--out FILE] [--trace FOLDER] [--no-compile] [--cpu]

The sections run one after the other, those that matter most first. Each consists of parts, such as the rows of a table,
which run in a separate process. A part that fails, or takes longer than its limit, ends this process; the next part
starts in a new one. So no failure loses more than its own row. The page is written again after each part, and keeps all
text that belongs to no section that has run.
"""

import argparse
import dataclasses
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.checkpoints import checkpoint_section
from benchmarks.gpu.kernels import kernels_section
from benchmarks.gpu.machine import device_name, machine_section
from benchmarks.gpu.memory import memory_section
from benchmarks.gpu.programs import programs_section
from benchmarks.gpu.rates import rates_section
from benchmarks.gpu.report import Content, Options, Outcome, content, header, reason, row, run_part
from benchmarks.gpu.speed import speed_section
from benchmarks.gpu.trace import trace_section
from benchmarks.gpu.training import layouts_section, transformers_section
from conformance.worker_pool import CONTEXT, WorkerError, WorkerPool

PAGE = Path("docs/reference/gpu.md")
SECONDS = 570.0  # for the sections that run by default, together
START = 60.0  # seconds in which a worker has to be there
RESULTS = "Results"  # heading above the summary


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        title: its heading.
        content: the function that returns its lines and parts.
        limit: seconds after which its parts end, so that time remains for the sections after it.
        first: whether it runs by default. Together, these fit into SECONDS.
    """

    title: str
    content: Callable[[Options], Content]
    limit: float
    first: bool = True


SECTIONS = {
    "programs": Section("The programs", programs_section, 60),  # does train.py work at all?
    "transformers": Section("One process", transformers_section, 60),
    "speed": Section("Speed and memory", speed_section, 180),
    "trace": Section("Where the time of a step goes", trace_section, 50),
    "rates": Section("Rates", rates_section, 70),
    "memory": Section("Memory of recomputation", memory_section, 60),
    "layouts": Section("Layouts", layouts_section, 90),
    "kernels": Section("Kernels and hand-written backwards", kernels_section, 120, first=False),
    "checkpoint": Section("Checkpoints", checkpoint_section, 120, first=False),
    "machine": Section("The machine", machine_section, 60, first=False),
}


@dataclasses.dataclass
class Result:
    """What is known of a section: its lines, the errors by part, its seconds and the machine."""

    machine: str
    lines: list[str] = dataclasses.field(default_factory=list)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def summary(self, title: str) -> str:
        verdict = f"**failed**: {len(self.errors)}" if self.errors else "ok"
        return row([title, verdict, f"{self.seconds:.0f}", self.machine])

    def text(self) -> str:
        lines = list(self.lines)
        for name, error in self.errors.items():
            if len(error.splitlines()) == 1:  # its row shows it
                continue
            lines += ["", f"**Failed: {name}**", "", "```text", error.replace("```", "'''").strip()[-3000:], "```"]
        return "\n".join(lines).strip("\n")


# ------------------------------------------------------------------------------------------------------------- running


def start_worker(on_gpu: bool) -> None:
    """Prepare a new worker: it has imported everything, and the GPU has a context."""
    if on_gpu:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda").item()


def run(pool: WorkerPool, section: Section, options: Options, index: int, limit: float, end: float) -> Outcome:
    """Run a part of a section within its limit and before `end`, in a new worker if there is none.

    Raises:
        WorkerError: the part raised an error, its process died, or it took too long.
    """
    if time.monotonic() > end:
        raise WorkerError("not run: the time of its section or of the whole program was over")
    if not pool.processes:
        pool.run(start_worker, 1, options.on_gpu, timeout=START)
    left = round(min(limit, max(1.0, end - time.monotonic())), 1)
    outcome: Outcome = pool.run(run_part, 1, section.content, options, index, timeout=left)[0]
    return outcome


def run_section(
    pool: WorkerPool, section: Section, options: Options, end: float, result: Result, write: Callable[[], None]
) -> None:
    """Run the parts of a section until `end`, and add each to `result` and to the page as soon as it is known."""
    start = time.monotonic()
    for index, item in enumerate(content(section.content, options)):
        if isinstance(item, str):
            result.lines.append(item)
            continue
        name = ", ".join(item.cells)
        try:
            outcome = run(pool, section, options, index, item.limit * options.patience, end)
        except WorkerError as error:
            outcome = Outcome([row([*item.cells, f"**failed**: {reason(str(error))}"])], str(error))
        result.lines += outcome.lines
        if outcome.problem:
            result.errors[name] = outcome.problem
        result.seconds = time.monotonic() - start
        write()


# ------------------------------------------------------------------------------------------------------------ the page


def merged(page: str, results: dict[str, Result]) -> str:
    """Return the page with new results. A section that has not run keeps its results, and all other text stays.

    Args:
        page: the page so far. Its headings `## ...` begin its blocks.
        results: results by name of section.
    """
    top, *rest = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    blocks = {each.partition("\n")[0].removeprefix("## "): each.partition("\n")[2].strip("\n") for each in rest}
    lines = blocks.pop(RESULTS, "").splitlines()
    found = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    sections = {section.title: blocks.pop(section.title, "") for section in SECTIONS.values()}
    for name, result in results.items():
        title = SECTIONS[name].title
        found[title], sections[title] = result.summary(title), result.text()
    known = [title for title in sections if title in found]
    summary = header("section", "result", "seconds", "machine") + [found[title] for title in known]
    blocks |= {RESULTS: "\n".join(summary).strip("\n")} | {title: sections[title] for title in known}
    return top + "\n\n".join(f"## {title}\n\n{text}" for title, text in blocks.items()) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        help="run these sections; the page keeps the others [those that fit into ten minutes]",
    )
    parser.add_argument("--out", type=Path, help=f"page to write the results into; default: {PAGE}, on a GPU")
    parser.add_argument("--trace", type=Path, help="folder in which to keep the traces of steps")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--cpu", action="store_true", help="try the program with tiny models on the CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the sections. Returns 0 if all checks pass."""
    parsed = parse(arguments)
    if not parsed.cpu and not torch.cuda.is_available():
        print("make gpu needs a GPU, and torch finds none on this machine (ARGS=--cpu tries the program on the CPU).")
        return 1
    # The processes need no other machine.
    for name, value in {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(name, value)
    options = Options(not parsed.cpu, not parsed.no_compile, parsed.trace and parsed.trace.absolute())
    out = parsed.out or (None if parsed.cpu else PAGE)
    before = out.read_text() if out and out.exists() else PAGE.read_text()
    pool = WorkerPool(context=multiprocessing.get_context("spawn") if options.on_gpu else CONTEXT)
    results: dict[str, Result] = {}

    def write() -> None:
        if out:
            out.write_text(merged(before, results))

    deadline, names = (
        time.monotonic() + SECONDS * options.patience,
        parsed.only or [name for name, each in SECTIONS.items() if each.first],
    )
    for name in names:
        result = results[name] = Result(device_name(options))
        end = (
            deadline if name == names[-1] else min(deadline, time.monotonic() + SECTIONS[name].limit * options.patience)
        )
        run_section(pool, SECTIONS[name], options, end, result, write)
        print(f"\n## {SECTIONS[name].title} ({result.seconds:.0f} s)\n\n{result.text()}", flush=True)
    pool.close()
    failed = [name for name, result in results.items() if result.errors]
    print(f"\n{len(results)} sections, {len(failed)} failed", *failed)
    return 1 if failed else 0
