"""Traces of recorded steps: RUN_DIR/trace_step_00000005.jsonl has a line for each action of each pp rank in step 5,

    {"rank": 0, "action": "0F0", "start": 0.0012, "end": 0.0150}

with times in seconds since the beginning of the step. A trace can also have messages and R, see `actions.Action`. The
first line has the settings on which the times depend, see `recorded.settings_of`:

    {"settings": {"training.seq_length": 1024, "stages": "Ett|ttL"}}
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from picotron.errors import UserError
from picotron.json_files import parse_json
from picotron.schedules.actions import parse_action
from picotron.schedules.simulate import Span, Timeline, computes


def trace_path(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir, f"trace_step_{step:08d}.jsonl")


def traces(run_dir: Path) -> dict[int, Path]:
    """Return the traces in a run's folder by step, in ascending order."""
    matches = (re.fullmatch(r"trace_step_([0-9]{8})\.jsonl", path.name) for path in run_dir.glob("trace_step_*"))
    return dict(sorted((int(match[1]), run_dir / match[0]) for match in matches if match))


def trace_line(rank: int, span: Span) -> str:
    return json.dumps({"rank": rank, "action": str(span.action), "start": span.start, "end": span.end})


def settings_line(settings: dict[str, Any]) -> str:
    return json.dumps({"settings": settings})


def read_trace(run_dir: str | Path, step: int | None = None) -> tuple[int, Timeline]:
    """Read the trace of a step, by default the newest one. Returns the step's number and its timeline.

    Raises:
        UserError: there is no such trace, or it cannot be read.
    """
    step, path, data = _read(run_dir, step)
    return step, parse_trace(data, str(path))


def read_settings(run_dir: str | Path) -> dict[str, Any]:
    """Read the settings of the newest trace. Raises a UserError as `read_trace`, or if the trace has no settings."""
    _, path, data = _read(run_dir)
    try:
        return dict(parse_json(data.partition(b"\n")[0], "the first line")["settings"])
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{path} does not say with which settings it was recorded; record a step again, with logging.trace_steps"
        ) from None


def _read(run_dir: str | Path, step: int | None = None) -> tuple[int, Path, bytes]:
    steps = list(traces(Path(run_dir)))
    if not steps:
        raise UserError(
            f"{str(run_dir)!r} has no traces, files like trace_step_00000005.jsonl; record a step with logging.trace_steps"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{str(run_dir)!r} has no trace of step {step}; choose one of {steps}")
    path = trace_path(run_dir, step)
    try:
        return step, path, path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}; check the path and its permissions") from None


def parse_trace(data: bytes, name: str) -> Timeline:
    """Return the timeline in the contents of a trace, see `read_trace`."""
    spans: dict[int, list[Span]] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            event = parse_json(line, "a line")
            if number == 1 and event.keys() == {"settings"}:
                continue
            span = Span(parse_action(event["action"]), float(event["start"]), float(event["end"]))
            if not 0 <= span.start <= span.end < math.inf:
                raise ValueError("times are out of order")
            spans.setdefault(int(event["rank"]), []).append(span)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise UserError(
                f"{name} is not a valid trace: line {number} is {line[:80].decode(errors='replace')!r}; expected "
                f'{{"rank": 0, "action": "0F0", "start": 0.0, "end": 1.0}}, with times in seconds'
            ) from None
    if not spans or sorted(spans) != list(range(len(spans))):
        raise UserError(f"{name} is incomplete: it has pp ranks {sorted(spans)}; expected 0, 1, ...")
    timeline = Timeline([sorted(spans[rank], key=lambda span: span.start) for rank in range(len(spans))])
    if not any(computes(span.action) and span.end > span.start for rank in timeline.spans for span in rank):
        raise UserError(f"{name} is incomplete: it has no forward or backward that takes time")
    return timeline
