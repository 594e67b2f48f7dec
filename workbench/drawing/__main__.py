"""Draw pipeline schedules, and steps that runs have recorded, as text or into files:

    python -m workbench.drawing schedule zbv --pp 4 --micro_batches 8
    python -m workbench.drawing csv own.csv --out own.svg

The unit of simulated times is the forward of one micro-batch through all stages of one rank. A backward takes 2 units,
and each half of a split backward takes 1 unit. Recorded times are in seconds.
"""

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from picotron.console import UserError
from workbench.console import number, print_line
from workbench.drawing.draw_svg import as_svg
from workbench.drawing.draw_text import as_text
from workbench.drawing.score import score_tables
from workbench.schedules.actions import AnyAction, Schedule
from workbench.schedules.generation import generation
from workbench.schedules.nccl_step import COMMUNICATORS, simulate_nccl
from workbench.schedules.schedule_csv import as_csv, assemble, is_message, read_csv, read_programs
from workbench.schedules.schedules import LOOPS, SCHEDULES, build
from workbench.schedules.search import Shape, fastest_schedule, shapes
from workbench.schedules.simulate import Costs, Timeline, simulate, summary
from workbench.schedules.trace import read_trace, recorded_costs

Timelines = dict[str, Timeline]  # by title


def draw_schedule(options: argparse.Namespace) -> Timelines:
    schedule = build(options.name, options.pp, options.micro_batches, options.chunks, options.group_size)
    return drawn(options.name, schedule, options)


def draw_csv(options: argparse.Namespace) -> Timelines:
    programs = read_programs(options.file)
    with_messages = any(is_message(action) for program in programs for action in program)
    schedule = assemble(programs, f"{options.file!r}")
    return drawn(options.file, schedule, options, programs if with_messages else ())


def draw_measured(options: argparse.Namespace) -> Timelines:
    step, timeline = read_trace(options.run_dir, options.step)
    return {f"{options.run_dir}, step {step}, in seconds": timeline}


def draw_generation(options: argparse.Namespace) -> Timelines:
    pp, groups, tokens, chunks = options.pp, options.groups or options.pp, options.tokens, options.chunks or 1
    caption = f"generation, pp={pp}, groups={groups}, tokens={tokens}, chunks={chunks}"
    return {caption: simulate(generation(pp, groups, tokens, chunks), equal_stages(pp, chunks, options))}


def search(options: argparse.Namespace) -> Timelines:
    pp, sizes, chunks = options.pp, options.activations, options.chunks
    if sizes:
        if len(sizes) % pp:
            raise UserError(f"--activations has {len(sizes)} sizes, but {pp} pp ranks need a multiple of {pp}")
        chunks = len(sizes) // pp
    return fastest(pp, {shape: equal_stages(pp, shape[0], options) for shape in shapes(chunks)}, options)


def search_measured(options: argparse.Namespace) -> Timelines:
    recorded, costs = recorded_costs(options.run_dir, options.step)
    if options.activations and len(options.activations) != recorded.num_stages:
        raise UserError(
            f"--activations has {len(options.activations)} sizes, but there are {recorded.num_stages} stages"
        )
    return fastest(recorded.pp, {(recorded.chunks, recorded.placement): costs}, options)


def fastest(pp: int, costs: Mapping[Shape, Costs], options: argparse.Namespace) -> Timelines:
    """Return the timeline of the fastest schedule that fits into --memory."""
    sizes = options.activations
    found = fastest_schedule(pp, options.micro_batches, options.memory, costs, sizes=sizes)
    name = f"{found.name}, {found.schedule.placement} placement, memory limit {options.memory:g}"
    timeline = dataclasses.replace(simulate(found.schedule, found.costs), sizes=sizes)
    return {f"{title(name, found.schedule)}, {found.quality}": timeline}


def drawn(
    name: str, schedule: Schedule, options: argparse.Namespace, programs: Sequence[Sequence[AnyAction]] = ()
) -> Timelines:
    """Return the timeline of a schedule with equal stages; with --nccl, also in the order of the programs' messages."""
    costs, caption = equal_stages(schedule.pp, schedule.chunks, options), title(name, schedule)
    if not options.nccl:
        waits = name in LOOPS and costs.p2p > 0
        return {caption: simulate(schedule, dataclasses.replace(costs, waits=waits))}
    played = simulate_nccl(schedule, costs, programs, options.nccl)
    stall = played.step_time / simulate(schedule, costs).step_time - 1
    return {f"{caption}, on NCCL (communicators: {options.nccl}) {stall:.1%} longer": played}


def equal_stages(pp: int, chunks: int, options: argparse.Namespace) -> Costs:
    """Return costs with which a rank takes the same time for a micro-batch, whatever the number of its stages."""
    return Costs(weights=[1 / chunks] * pp * chunks, p2p=options.p2p)


def score(options: argparse.Namespace) -> Timelines:
    """Print the tables of `score_tables`. There is nothing to draw."""
    for table in score_tables({file: read_csv(file) for file in options.files}):
        print_line(table)
    return {}


def title(name: str, schedule: Schedule) -> str:
    return f"{name}, pp={schedule.pp}, micro_batches={schedule.micro_batches}, chunks={schedule.chunks}"


class Command(NamedTuple):
    """A command: its function, a sentence and an example for --help, and its options. `a|b` exclude each other."""

    run: Callable[[argparse.Namespace], Timelines]
    help: str
    example: str
    options: str


COMMANDS = {
    "schedule": Command(
        draw_schedule,
        "draw a hand-made schedule",
        "zbv --pp 4 --micro_batches 8 --out zbv.svg",
        "name --pp --micro_batches --chunks --group_size --p2p --nccl --out",
    ),
    "csv": Command(
        draw_csv,
        "draw a schedule from a CSV file with one line of actions per pp rank",
        "own.csv --p2p 0.1",
        "file --p2p --nccl --out",
    ),
    "measured": Command(
        draw_measured,
        "draw a step that a run recorded (logging.trace_steps)",
        "runs/pp2 --step 4",
        "run_dir --step --out",
    ),
    "generation": Command(
        draw_generation,
        "draw the rotation in which a pipeline generates text",
        "--pp 3 --tokens 4",
        "--pp --groups --tokens --chunks --p2p --out",
    ),
    "search": Command(
        search,
        "find the fastest schedule that fits into memory",
        "--pp 2 --micro_batches 4 --activations 5.04 3.9 --memory 8",
        "--memory --pp --micro_batches --chunks|--activations --p2p --out",
    ),
    "search_measured": Command(
        search_measured,
        "find the fastest schedule for the times in a recorded step",
        "runs/pp2 --memory 2 --out found.csv",
        "run_dir --memory --step --micro_batches --activations --out",
    ),
    "score": Command(
        score,
        "rank a schedule in a CSV file among the published ones, under the settings of docs/scoreboard.md",
        "own.csv",
        "files",
    ),
}

COUNT: dict[str, Any] = {"type": number(int, 1), "metavar": "N"}
TIME: dict[str, Any] = {"type": number(float, 0, 1e30), "metavar": "TIME", "default": 0.0}
SIZE: dict[str, Any] = {"type": number(float, 0, 1e30), "metavar": "SIZE"}
OPTIONS: dict[str, dict[str, Any]] = {
    "name": {"metavar": "NAME", "choices": SCHEDULES, "help": ", ".join(SCHEDULES)},
    "file": {"metavar": "FILE", "help": "the CSV file"},
    "files": {"metavar": "FILE", "nargs": "+", "help": "the CSV file, and others to rank with it"},
    "run_dir": {"metavar": "RUN_DIR", "help": "the folder of the run"},
    "--step": COUNT | {"help": "the recorded step; by default the newest"},
    "--pp": COUNT | {"default": 4, "help": "pp ranks; by default 4"},
    "--micro_batches": COUNT | {"default": 8, "help": "micro-batches per step; by default 8"},
    "--groups": COUNT | {"help": "groups of prompts; by default as many as pp ranks"},
    "--tokens": COUNT | {"default": 4, "help": "tokens to generate for each prompt; by default 4"},
    "--chunks": COUNT | {"help": "stages per pp rank, where a schedule works with any number"},
    "--group_size": COUNT | {"help": "micro-batches that take turns on the chunks of interleaved_1f1b and zb_h1"},
    "--p2p": TIME | {"help": "latency of a message between pp ranks; by default 0"},
    "--nccl": {"nargs": "?", "const": "directions", "choices": COMMUNICATORS,
               "help": "run the messages of each communicator in the order of the calls, as NCCL does: those of the file, "
                       "or those that picotron adds; default: two communicators, one for each direction"},
    "--activations": SIZE | {"nargs": "+", "help": "activations of a micro-batch in each stage, in any unit; by default, "
                                                   "those in all stages of a pp rank are 1"},
    "--memory": SIZE | {"required": True, "help": "the most activations that a pp rank may hold, in micro-batches or "
                                                  "in the unit of --activations"},
    "--out": {"type": Path, "metavar": "FILE", "help": "file to write instead of text: .svg, or .csv (the schedule)"},
}  # fmt: skip


def write(timelines: Timelines, path: Path) -> None:
    """Write a timeline in the format of the path's suffix.

    Raises:
        UserError: the suffix is unknown, or the file cannot be written.
    """
    if path.suffix not in (".svg", ".csv"):
        raise UserError(f"--out {path} must end in .svg or .csv (the schedule)")
    for timeline in timelines.values():
        text = as_svg(timeline) if path.suffix == ".svg" else as_csv(timeline.programs)
        try:
            path.write_text(text)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another file") from None


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    program = "python -m workbench.drawing"
    parser = argparse.ArgumentParser(prog=program, description=__doc__, formatter_class=raw)
    parser.set_defaults(out=None)  # for commands without this option
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = f"{command.help}:\n\n    {program} {name} {command.example}"
        own = commands.add_parser(name, help=command.help, description=description, formatter_class=raw)
        own.set_defaults(run=command.run)
        for option in command.options.split():
            group = own.add_mutually_exclusive_group() if "|" in option else own
            for each in option.split("|"):
                group.add_argument(each, **OPTIONS[each])
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    try:
        timelines = options.run(options)
        if options.out:
            write(timelines, options.out)
            return
        width = shutil.get_terminal_size((160, 24)).columns - len("pp 0  ")
        for name, timeline in timelines.items():
            facts = ", ".join(f"{key} {value}" for key, value in summary(timeline).items())
            print_line(f"{name}\n{as_text(timeline, width)}\n{facts}\n")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
