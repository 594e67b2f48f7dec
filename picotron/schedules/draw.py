"""Draw a pipeline schedule, or what a run measured of one, as text, picture, trace or page:

    python -m picotron.schedules.draw --schedule zbv --pp 4 --microbatches 8 --out zbv.svg
    python -m picotron.schedules.draw --measured out/run --step 5
    python -m picotron.schedules.draw --all --pp 4 --microbatches 8 --out schedules.html

Simulated times are in units of a micro-batch's forward through all stages of one rank. A backward takes twice as long,
each half of a split one as long.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from picotron.errors import UserError
from picotron.schedules.actions import Overlapped
from picotron.schedules.draw_svg import as_page, as_svg
from picotron.schedules.schedule_csv import read_csv, write_csv
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, Timeline, computes, simulate, summary
from picotron.schedules.trace import read_trace


def as_text(timeline: Timeline, width: int = 160) -> str:
    """A line per rank. Dots are idle time. If names like 2F0 do not fit, there is a letter for each kind of action: a
    small one for every other chunk, X (or x) for an overlapped pair.

    Args:
        width: in characters; the text may be shorter.
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
    """JSON for Perfetto (ui.perfetto.dev) and chrome://tracing; a unit of time becomes a second. Messages and
    reductions have lines of their own, as they overlap computations.
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
    """Write named timelines in the format of the path's suffix; more than one only as .html.

    Raises:
        UserError: there is no such format, or the file cannot be written.
    """
    timeline = next(iter(timelines.values()))
    if path.suffix not in (".svg", ".json", ".csv", ".html"):
        raise UserError(f"--out {path} should end in .svg, .html, .json (a trace) or .csv (the schedule)")
    if len(timelines) > 1 and path.suffix != ".html":
        raise UserError(f"--out {path} can hold one schedule; all of them go to an .html file")
    try:
        match path.suffix:
            case ".svg":
                path.write_text(as_svg(timeline), encoding="utf-8")
            case ".html":
                path.write_text(as_page("Pipeline schedules", timelines), encoding="utf-8")
            case ".json":
                path.write_text(as_trace(timeline))
            case ".csv":
                write_csv(timeline.programs, path)
    except OSError as error:
        raise UserError(f"cannot write --out {path}: {error.strerror}") from None


def timelines_of(arguments: argparse.Namespace) -> dict[str, Timeline]:
    """By title, what the command line asks for."""
    pp, microbatches, chunks = arguments.pp, arguments.microbatches, arguments.chunks
    if arguments.measured:
        step, timeline = read_trace(arguments.measured, arguments.step)
        return {f"{arguments.measured}, step {step}, in seconds": timeline}
    if arguments.csv:
        schedules = {arguments.csv: read_csv(arguments.csv)}
    elif arguments.all:
        schedules = {
            name: build(name, pp, microbatches, chunks if recipe.any_chunks else None)
            for name, recipe in SCHEDULES.items()
        }
    else:
        schedules = {arguments.schedule: build(arguments.schedule, pp, microbatches, chunks)}
    found = {}
    for name, schedule in schedules.items():
        # Each rank needs as long for a micro-batch, however many stages it has.
        costs = Costs(weights=[1 / schedule.chunks] * schedule.num_stages, p2p=arguments.p2p)
        title = f"{name}, pp={schedule.pp}, microbatches={schedule.microbatches}, chunks={schedule.chunks}"
        found[title] = simulate(schedule, costs)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m picotron.schedules.draw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}")
    what.add_argument("--all", action="store_true", help="all of these")
    what.add_argument("--csv", metavar="FILE", help="a schedule of your own, a line of actions for each rank")
    what.add_argument("--measured", metavar="RUN_DIR", help="what a run measured of a step")
    parser.add_argument("--step", type=int, help="which step was measured; by default the newest")
    parser.add_argument("--pp", type=int, default=4, help="ranks")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="stages per rank, for schedules that work with any number")
    parser.add_argument("--p2p", type=float, default=0.0, help="time of a message between ranks")
    parser.add_argument("--out", type=Path, help=".svg, .html, .json or .csv; by default text in the terminal")
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
