"""Check and measure picotron on this machine's GPUs, and write docs/gpu.md:

    make gpu        or: python -m tests.gpu [--only SECTION ...] [--out FILE] [--trace FOLDER] [--no-compile] [--cpu]

Each section is a function that yields the lines of its part of the page. The sections run one after the other in a
separate process, which is replaced if a section fails, so that no failure loses the other sections. The page is
written again after each section.
"""

import argparse
import dataclasses
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu.checkpoints import checkpoint_section
from tests.gpu.kernels import kernels_section
from tests.gpu.machine import machine_section
from tests.gpu.report import Lines, Options, header, row
from tests.gpu.speed import speed_section
from tests.gpu.trace import trace_section
from tests.gpu.training import layouts_section, transformers_section
from tests.support.worker_pool import CONTEXT, WorkerError, WorkerPool

PAGE = Path("docs/gpu.md")
SECONDS = 570.0  # for all sections together
INTRODUCTION = """\
# GPUs

Terms and symbols: [terms.md](terms.md).

`make gpu` wrote this page. It compares picotron with torch and transformers on the GPUs of one machine, and measures its
speed and memory there. `make gpu` fails if a check does.
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        title: its heading.
        lines: the function that runs it.
        limit: seconds after which it is ended; the lines until then are kept.
    """

    title: str
    lines: Callable[[Options], Lines]
    limit: float


SECTIONS = {
    "machine": Section("The machine", machine_section, 150),  # includes the start of the process
    "kernels": Section("Kernels and hand-written backwards", kernels_section, 120),
    "transformers": Section("One process", transformers_section, 90),
    "layouts": Section("Layouts", layouts_section, 240),
    "checkpoint": Section("Checkpoints", checkpoint_section, 90),
    "trace": Section("Where the time of a step goes", trace_section, 90),
    "speed": Section("Speed and memory", speed_section, 400),  # the longest one, which may use all remaining time
}


@dataclasses.dataclass
class Result:
    """Lines of a section, its seconds, and why it failed."""

    lines: str
    seconds: float
    error: str | None


def write_lines(lines: Callable[[Options], Lines], options: Options, path: Path) -> None:
    """Run a section and append its lines to a file, each of them as soon as it is there."""
    if options.on_gpu:
        torch.cuda.set_device(options.device)
    with warnings.catch_warnings(), path.open("w") as file:
        warnings.simplefilter("default")  # shown, while the workers of tests raise them
        for line in lines(options):
            print(line, file=file, flush=True)


def run(pool: WorkerPool, section: Section, options: Options, limit: float) -> Result:
    start, error = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "section.md")
        path.touch()
        try:
            pool.run(write_lines, 1, section.lines, options, path, timeout=limit)
        except WorkerError as failure:
            error = str(failure)
        return Result(path.read_text(), time.monotonic() - start, error)


def page(results: dict[str, Result]) -> str:
    """Return the page: a summary, and the sections."""
    lines = [INTRODUCTION, "## Summary", *header("section", "result", "seconds")]
    for name, result in results.items():
        lines.append(row([SECTIONS[name].title, "**failed**" if result.error else "ok", f"{result.seconds:.0f}"]))
    for name, result in results.items():
        lines += ["", f"## {SECTIONS[name].title}", "", result.lines.strip("\n")]
        if result.error:
            text = result.error.replace("```", "'''").strip()
            lines += ["", "**This section failed:**", "", "```text", text[-6000:], "```"]
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="run these sections, and print them")
    parser.add_argument("--out", type=Path, help=f"file to write; default: {PAGE} if all sections run on a GPU")
    parser.add_argument("--trace", type=Path, help="folder in which to keep the trace of a step")
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
    out = parsed.out or (None if parsed.cpu or parsed.only else PAGE)
    pool = WorkerPool(context=multiprocessing.get_context("spawn") if options.on_gpu else CONTEXT)
    results: dict[str, Result] = {}
    deadline = time.monotonic() + SECONDS
    for name in parsed.only or SECTIONS:
        left = max(1.0, deadline - time.monotonic())
        result = results[name] = run(pool, SECTIONS[name], options, min(SECTIONS[name].limit, left))
        print(f"\n## {SECTIONS[name].title} ({result.seconds:.0f} s)\n\n{result.lines}", flush=True)
        if result.error:
            print(f"failed:\n{result.error}", flush=True)
        if out:
            out.write_text(page(results))
    pool.close()
    failed = [name for name, result in results.items() if result.error]
    print(f"{len(results)} sections, {len(failed)} failed", *failed)
    return 1 if failed else 0
