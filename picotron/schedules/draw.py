"""Draw a pipeline schedule, or a step that a run recorded, as text, picture, trace or page:

    python -m picotron.schedules.draw --schedule zbv --pp 4 --microbatches 8 --out zbv.svg
    python -m picotron.schedules.draw --measured out/run --step 5
    python -m picotron.schedules.draw --all --pp 4 --microbatches 8 --out schedules.html

The unit of simulated times is the forward of one micro-batch through all stages of one rank. A backward takes 2 units,
and each half of a split backward takes 1 unit.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picotron.arguments import number
from picotron.errors import UserError
from picotron.files import create
from picotron.schedules.actions import Overlapped
from picotron.schedules.draw_svg import as_page, as_svg
from picotron.schedules.generation import generation
from picotron.schedules.schedule_csv import as_csv, read_csv
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, Timeline, computes, simulate, summary
from picotron.schedules.trace import read_trace


def as_text(timeline: Timeline, width: int = 160) -> str:
    """Draw a timeline as text, with one line per rank. Dots are idle time. If names like 2F0 do not fit, an action is
    shown as a letter: its kind, or X for an overlapped pair, in lower case for every other chunk.

    Args:
        width: largest width of the timeline, in characters.
    """
    spans = [[span for span in rank if computes(span.action) and span.end > span.start] for rank in timeline.spans]
    longest_name = max(len(str(action)) for rank in spans for action, _, _ in rank)
    shortest = min(end - start for rank in spans for _, start, end in rank)
    names_fit = timeline.step_time / shortest * (longest_name + 1) <= width
    scale = (longest_name + 1) / shortest if names_fit else min(1 / shortest, width / timeline.step_time)
    lines = []
    for rank in spans:
        stages = sorted({part.stage for action, _, _ in rank for part in action.parts})
        line = ["."] * round(timeline.step_time * scale)
        for action, start, end in rank:
            first, last = round(start * scale), round(end * scale)
            if names_fit:
                text = str(action).ljust(last - first - 1, "-") + " "
            else:
                letter = "X" if isinstance(action, Overlapped) else action.kind
                odd_chunk = stages.index(action.parts[0].stage) % 2
                text = (letter.lower() if odd_chunk else letter).ljust(last - first, "-")
            line[first:last] = text[: last - first]
        lines.append("".join(line).rstrip())
    return "\n".join(f"pp {rank}  {line}" for rank, line in enumerate(lines))


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
    if arguments.schedule == "generation":
        tokens, rotation = arguments.tokens or 4, generation(pp, microbatches, arguments.tokens or 4, chunks or 1)
        costs = Costs(weights=[1 / rotation.chunks] * rotation.num_stages, p2p=arguments.p2p)
        title = f"generation, pp={pp}, groups={microbatches}, tokens={tokens}, chunks={rotation.chunks}"
        return {title: simulate(rotation, costs)}
    if arguments.tokens:
        raise UserError(f"--tokens {arguments.tokens} is only for --schedule generation; remove it")
    if arguments.csv:
        schedules = {arguments.csv: read_csv(arguments.csv)}
    elif arguments.all:
        schedules = {
            name: build(name, pp, microbatches, chunks if recipe.any_chunks else None)
            for name, recipe in SCHEDULES.items()
        }
    else:
        schedules = {arguments.schedule: build(arguments.schedule, pp, microbatches, chunks)}
    timelines = {}
    for name, schedule in schedules.items():
        # The weights make a rank take the same time for a micro-batch, whatever the number of its stages.
        costs = Costs(weights=[1 / schedule.chunks] * schedule.num_stages, p2p=arguments.p2p)
        title = f"{name}, pp={schedule.pp}, microbatches={schedule.microbatches}, chunks={schedule.chunks}"
        timelines[title] = simulate(schedule, costs)
    return timelines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m picotron.schedules.draw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}, or generation; by default 1f1b"
    )
    what.add_argument("--all", action="store_true", help="draw all of these schedules")
    what.add_argument(
        "--csv", metavar="FILE", help="draw a schedule from a CSV file with one line of actions per pp rank"
    )
    what.add_argument("--measured", metavar="RUN_DIR", help="draw a step that a run recorded (logging.trace_steps)")
    parser.add_argument("--step", type=number(int, 1), help="number of the recorded step; by default the newest")
    parser.add_argument("--pp", type=number(int, 1), default=4, help="number of pp ranks; by default 4")
    parser.add_argument(
        "--microbatches", type=number(int, 1), default=8, help="number of micro-batches per step; by default 8"
    )
    parser.add_argument(
        "--tokens",
        type=number(int, 1),
        help="tokens per prompt, only for generation, whose micro-batches are groups of prompts; by default 4",
    )
    parser.add_argument(
        "--chunks", type=number(int, 1), help="stages per pp rank, for schedules that work with any number"
    )
    parser.add_argument(
        "--p2p",
        type=number(float, 0),
        default=0.0,
        help="time of a message between pp ranks, in the unit above; by default 0",
    )
    parser.add_argument("--out", type=Path, help=".svg, .html, .json or .csv file; by default, text is printed")
    options = parser.parse_args(arguments)
    try:
        timelines = timelines_of(options)
        if options.out:
            write(timelines, options.out)
            return
        width = shutil.get_terminal_size((160, 24)).columns - len("pp 0  ")
        for title, timeline in timelines.items():
            facts = ", ".join(f"{name} {value}" for name, value in summary(timeline).items())
            print(f"{title}\n{as_text(timeline, width)}\n{facts}\n")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
