"""Draw a pipeline schedule, or a step that a run recorded, as text, picture, trace or page:

    python -m picotron.drawing.draw --schedule zbv --pp 4 --microbatches 8 --out zbv.svg
    python -m picotron.drawing.draw --measured out/run --step 5
    python -m picotron.drawing.draw --all --pp 4 --microbatches 8 --out schedules.html
    python -m picotron.drawing.draw --schedule auto --costs out/run --memory 4

The unit of simulated times is the forward of one micro-batch through all stages of one rank. A backward takes 2 units,
and each half of a split backward takes 1 unit. `--schedule auto` searches the fastest schedule that fits into memory.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picotron.console import UserError, number, print_line
from picotron.drawing.draw_svg import as_page, as_svg
from picotron.drawing.draw_text import as_text
from picotron.files import create
from picotron.schedules.actions import Overlapped, Schedule
from picotron.schedules.generation import generation
from picotron.schedules.schedule_csv import as_csv, read_csv
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.search import fastest_schedule, shapes
from picotron.schedules.simulate import Costs, Timeline, computes, simulate, summary
from picotron.schedules.trace import read_trace, recorded_costs


def as_trace(timeline: Timeline) -> str:
    """Return JSON for Perfetto (ui.perfetto.dev) and chrome://tracing. A unit of time becomes a second. Messages and
    reductions have separate lines, because they overlap computations.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        for action, start, end in spans:
            line = 2 * rank + (not computes(action))
            kind = "overlapped" if isinstance(action, Overlapped) else action.kind
            when = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": str(action), "cat": kind, "ph": "X", "pid": 0, "tid": line, **when})
        for line, name in ((2 * rank, f"pp {rank}"), (2 * rank + 1, f"pp {rank} messages")):
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": line, "args": {"name": name}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def write(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write named timelines in the format of the path's suffix. Only .html can hold more than one.

    Raises:
        UserError: the suffix is unknown, or the file cannot be written.
    """
    timeline = next(iter(timelines.values()))
    if path.suffix not in (".svg", ".json", ".csv", ".html"):
        raise UserError(f"--out {path} must end in .svg, .html, .json (a trace) or .csv (the schedule)")
    if len(timelines) > 1 and path.suffix != ".html":
        raise UserError(f"--out {path} can hold only one schedule; use an .html file")
    match path.suffix:
        case ".svg":
            text = as_svg(timeline)
        case ".html":
            text = as_page("Pipeline schedules", timelines)
        case ".json":
            text = as_trace(timeline)
        case _:
            text = as_csv(timeline.programs)
    try:
        with open(path, "w", encoding="utf-8", opener=create) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write --out {path}: {error.strerror}") from None


def timelines_of(arguments: argparse.Namespace) -> dict[str, Timeline]:
    """Return the timelines to draw, by title."""
    pp, microbatches, chunks = arguments.pp, arguments.microbatches, arguments.chunks
    if arguments.measured:
        step, timeline = read_trace(arguments.measured, arguments.step)
        return {f"{arguments.measured}, step {step}, in seconds": timeline}
    if arguments.csv:
        schedules = {arguments.csv: read_csv(arguments.csv)}
    elif arguments.schedule == "generation":
        tokens = arguments.tokens or 4
        rotation = generation(pp, microbatches, tokens, chunks or 1)
        caption = f"generation, pp={pp}, groups={microbatches}, tokens={tokens}, chunks={rotation.chunks}"
        return {caption: simulate(rotation, equal_stages(pp, rotation.chunks, arguments))}
    elif arguments.schedule == "auto":
        return searched(arguments)
    elif arguments.all:
        schedules = {
            name: build(
                name,
                pp,
                microbatches,
                chunks if recipe.any_chunks else None,
                arguments.group_size if recipe.has_groups else None,
            )
            for name, recipe in SCHEDULES.items()
        }
    else:
        schedules = {arguments.schedule: build(arguments.schedule, pp, microbatches, chunks, arguments.group_size)}
    return {
        title(name, schedule): simulate(schedule, equal_stages(schedule.pp, schedule.chunks, arguments))
        for name, schedule in schedules.items()
    }


def searched(arguments: argparse.Namespace) -> dict[str, Timeline]:
    """Return the timeline of the fastest schedule, see `search`."""
    pp, microbatches, sizes = arguments.pp, arguments.microbatches, arguments.activations
    memory, chunks = pp if arguments.memory is None else arguments.memory, arguments.chunks
    if sizes:
        if arguments.memory is None:
            raise UserError(
                "--schedule auto with --activations needs --memory, the limit of a pp rank in the same unit"
            )
        if len(sizes) % pp or chunks not in (None, len(sizes) // pp):
            stages = f"{pp} pp ranks need a multiple of {pp}" if chunks is None else f"there are {pp * chunks} stages"
            raise UserError(f"--activations has {len(sizes)} sizes, but {stages}")
        chunks = len(sizes) // pp
    if arguments.costs:
        recorded, costs = recorded_costs(arguments.costs, arguments.step)
        if (recorded.pp, chunks or recorded.chunks) != (pp, recorded.chunks):
            raise UserError(
                f"the run {arguments.costs!r} has pp={recorded.pp} and {recorded.chunks} chunk(s) per pp rank; "
                f"use --pp {recorded.pp} --chunks {recorded.chunks}"
            )
        given = {name: value for name in ("p2p", "transfer") if (value := getattr(arguments, name)) is not None}
        costs = dataclasses.replace(costs, **given)
        options = {(recorded.chunks, recorded.placement): costs}
    else:
        options = {shape: equal_stages(pp, shape[0], arguments) for shape in shapes(chunks)}
    found = fastest_schedule(pp, microbatches, memory, options, arguments.deferred, sizes=sizes)
    name = f"auto: {found.name}, {found.schedule.placement} placement, memory limit {memory:g}"
    return {title(name, found.schedule): simulate(found.schedule, found.costs)}


def with_memory(timeline: Timeline, arguments: argparse.Namespace) -> Timeline:
    """Return the timeline with the activations of each stage that are given on the command line."""
    stages = {part.stage for program in timeline.programs for action in program for part in action.parts}
    if arguments.activations and len(arguments.activations) != len(stages):
        raise UserError(f"--activations has {len(arguments.activations)} sizes, but there are {len(stages)} stages")
    return dataclasses.replace(timeline, sizes=arguments.activations, deferred=arguments.deferred)


def equal_stages(pp: int, chunks: int, arguments: argparse.Namespace) -> Costs:
    """Return costs with which a rank takes the same time for a micro-batch, whatever the number of its stages."""
    return Costs(weights=[1 / chunks] * pp * chunks, p2p=arguments.p2p or 0.0, transfer=arguments.transfer or 0.0)


def title(name: str, schedule: Schedule) -> str:
    return f"{name}, pp={schedule.pp}, microbatches={schedule.microbatches}, chunks={schedule.chunks}"


def check_options(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option is given that would have no effect."""
    named = not (arguments.csv or arguments.measured or arguments.all)
    searches, generates = (named and arguments.schedule == name for name in ("auto", "generation"))
    drawn = [name for name in ("csv", "measured") if getattr(arguments, name)]
    unused = {
        "--memory": arguments.memory is not None and not searches,
        "--costs": arguments.costs is not None and not searches,
        "--group_size": arguments.group_size is not None and (searches or generates or bool(drawn)),
        "--tokens": arguments.tokens is not None and not generates,
        "--activations": arguments.activations is not None and generates,
        "--deferred": arguments.deferred is not None and generates,
        "--step": arguments.step is not None and not arguments.measured and not arguments.costs,
    }
    for names, has_own in ((("pp", "microbatches", "chunks"), drawn), (("p2p", "transfer"), arguments.measured)):
        unused |= {f"--{name}": getattr(arguments, name) is not None and bool(has_own) for name in names}
    for option, is_unused in unused.items():
        if is_unused:
            what = f"--{drawn[0]}" if drawn else "--all" if arguments.all else f"--schedule {arguments.schedule}"
            raise UserError(f"{option} has no effect with {what}; remove it")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m picotron.drawing.draw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}, auto or generation; by default 1f1b"
    )
    what.add_argument("--all", action="store_true", help="draw all of these schedules")
    what.add_argument(
        "--csv", metavar="FILE", help="draw a schedule from a CSV file with one line of actions per pp rank"
    )
    what.add_argument("--measured", metavar="RUN_DIR", help="draw a step that a run recorded (logging.trace_steps)")
    parser.add_argument("--step", type=number(int, 1), help="number of the recorded step; by default the newest")
    parser.add_argument("--pp", type=number(int, 1), help="number of pp ranks; by default 4")
    parser.add_argument("--microbatches", type=number(int, 1), help="number of micro-batches per step; by default 8")
    parser.add_argument(
        "--tokens",
        type=number(int, 1),
        help="tokens per prompt, only for generation, whose micro-batches are groups of prompts; by default 4",
    )
    parser.add_argument(
        "--chunks", type=number(int, 1), help="stages per pp rank, for schedules that work with any number"
    )
    parser.add_argument(
        "--group_size", type=number(int, 1), help="micro-batches that take turns on the chunks of interleaved schedules"
    )
    parser.add_argument(
        "--p2p",
        type=number(float, 0),
        help="latency of a message between pp ranks, in the unit above; by default 0, or with --costs as estimated from them",
    )
    parser.add_argument(
        "--transfer",
        type=number(float, 0),
        help="time in which a message occupies the link between two ranks, in the unit above; by default 0",
    )
    parser.add_argument(
        "--memory",
        type=number(float, 0),
        help="for auto: the most activations that a pp rank may hold, in micro-batches or in the unit of --activations; "
        "by default, --pp micro-batches",
    )
    parser.add_argument(
        "--activations",
        type=number(float, 0),
        nargs="+",
        metavar="SIZE",
        help="size of a micro-batch's activations in each stage, in any unit; by default, a micro-batch on a rank is 1",
    )
    parser.add_argument(
        "--deferred", type=number(float, 0, 1), help="fraction of them that W needs after I; by default 1"
    )
    parser.add_argument(
        "--costs", metavar="RUN_DIR", help="for auto: use the times, in seconds, of a step that a run recorded"
    )
    parser.add_argument("--out", type=Path, help=".svg, .html, .json or .csv file; by default, text is printed")
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        options.pp, options.microbatches = options.pp or 4, options.microbatches or 8
        options.deferred = 1.0 if options.deferred is None else options.deferred
        timelines = {title: with_memory(timeline, options) for title, timeline in timelines_of(options).items()}
        if options.out:
            write(timelines, options.out)
            return
        width = shutil.get_terminal_size((160, 24)).columns - len("pp 0  ")
        for title, timeline in timelines.items():
            facts = ", ".join(f"{name} {value}" for name, value in summary(timeline).items())
            print_line(f"{title}\n{as_text(timeline, width)}\n{facts}\n")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
