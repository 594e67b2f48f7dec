"""Timelines as files: pictures, pages, traces and schedules."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picotron.console import UserError
from workbench.drawing.draw_svg import as_page, as_svg
from workbench.schedules.actions import Overlapped
from workbench.schedules.schedule_csv import as_csv
from workbench.schedules.simulate import Timeline, computes


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
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write --out {path}: {error.strerror}") from None
