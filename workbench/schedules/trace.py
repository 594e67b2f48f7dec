"""Traces of recorded steps, and the times of actions in them, to simulate and to search schedules with.

RUN_DIR/trace_step_00000005.jsonl has a line for each action of each pp rank in step 5,

    {"rank": 0, "action": "0F0", "start": 0.0012, "end": 0.0150}

with times in seconds since the beginning of the step. A trace can also have messages and R, see `actions.Action`. The
first line has the settings on which the times depend, see `pipeline_parallel.plan.settings_of`:

    {"settings": {"training.seq_length": 1024, "stages": "Ett|ttL"}}
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from picotron.console import UserError
from workbench.files import parse_json
from workbench.schedules.actions import Schedule, parse_action
from workbench.schedules.order import Event
from workbench.schedules.schedule_csv import assemble
from workbench.schedules.simulate import Costs, Span, Timeline, computes, measured_costs


def trace_path(run_dir: str | Path, step: int) -> Path:
    """Return the trace of a step in a run's folder."""
    return Path(run_dir, f"trace_step_{step:08d}.jsonl")


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
    traces = Path(run_dir).glob(f"trace_step_{8 * '[0-9]'}*.jsonl")
    names = [path.stem.removeprefix("trace_step_") for path in traces]
    steps = sorted(int(name) for name in names if name.isdecimal())
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


def check_recording(run_dir: str, settings: dict[str, Any]) -> None:
    """Raise a UserError unless the newest recorded step of a run has these settings, see `settings_of`."""
    recorded = read_settings(run_dir)
    different = [
        f"{key}={recorded.get(key)!r}, not {value!r}" for key, value in settings.items() if recorded.get(key) != value
    ]
    if different:
        raise UserError(
            f"the run in pp_recording={run_dir!r} was recorded with {'; '.join(different)}; record a run with the settings of "
            f"this config, or remove pp_recording"
        )


def recorded_costs(run_dir: str | Path, step: int | None = None) -> tuple[Schedule, Costs]:
    """Return the schedule of a recorded step, and the times of all kinds of actions in its stages, in seconds.

    If the recorded schedule splits no backward of a stage, each half is estimated to take half as long as the full one.

    Args:
        step: number of the recorded step, by default the newest.
    """
    step, timeline = read_trace(run_dir, step)
    return timeline_costs(timeline, f"of step {step} in {str(run_dir)!r}")


def timeline_costs(timeline: Timeline, name: str) -> tuple[Schedule, Costs]:
    """Return the schedule and the times of a recorded timeline, see `recorded_costs`."""
    schedule = assemble(timeline.programs, name)
    times = dict(measured_costs(timeline).measured)
    for stage in range(schedule.num_stages):
        full, i, w = ((kind, stage) for kind in "BIW")
        if (i,) in times:
            times.setdefault((full,), times[i,] + times[w,])
        # The last backward of a stage is in no pair, because no forward is left. So there is an I or a B.
        times.setdefault((i,), times[full,] / 2)
        times.setdefault((w,), times[full,] / 2)
    return schedule, dataclasses.replace(Costs(measured=times), p2p=message_time(schedule, timeline))


def message_time(schedule: Schedule, timeline: Timeline) -> float:
    """Estimate the time of a message: the shortest time from the end of an action to the start of one on another rank
    that needs its result, which often waits for the message.

    The clocks of two ranks differ a little, which prolongs messages in one direction and shortens those in the other.
    So the estimate for a pair of ranks is the mean over both directions. Of several pairs, the result is the median.
    """
    ends = {
        part.result: (rank, s.end)
        for rank, spans in enumerate(timeline.spans)
        for s in spans
        for part in s.action.parts
    }
    shortest: dict[tuple[int, int], float] = {}
    for rank, span in ((rank, span) for rank, spans in enumerate(timeline.spans) for span in spans):
        for source in filter(None, map(schedule.source, span.action.parts)):
            sender, end = ends[source]
            if sender != rank:
                shortest[sender, rank] = min(shortest.get((sender, rank), span.start - end), span.start - end)
    pairs = [(a, b) for a, b in itertools.combinations(range(schedule.pp), 2) if {(a, b), (b, a)} <= shortest.keys()]
    return max(0.0, median_low([(shortest[a, b] + shortest[b, a]) / 2 for a, b in pairs] or [0.0]))


def waited_for(events: Sequence[Event], timeline: Timeline, latency: float | None) -> list[int | None]:
    """Return for each event the number of the event that it waited for last, or None if it waited for none: the one
    before it on its rank if it starts when that one ends, else the one on another rank whose message it waits for.

    Going back from the last action to end, these events are the critical path: the step gets shorter only if one of
    them or of the messages between them does. (A message that queues for the link between two ranks counts as long.)

    Args:
        events: the `run_order` of a schedule.
        timeline: the simulation of these events, or a measured step of them, without messages.
        latency: only for a measured step, in which an action starts a little after what it waited for: the time of a
            message. The action waited for the event that ended last, or whose message arrived last.
    """
    waits: list[int | None] = []
    spans = [iter(rank) for rank in timeline.spans]
    last: list[int | None] = [None] * len(spans)  # the last event on each rank
    ends: list[float] = []  # of the events
    results: list[int] = []  # the event that computes each result
    for number, (rank, _, sources, receivers) in enumerate(events):
        _, start, end = next(spans[rank])
        before = last[rank]
        free = 0.0 if before is None else ends[before]
        if start > free:
            others = [results[source] for source in sources if events[results[source]].rank != rank]
            sender = max(others, key=ends.__getitem__, default=None)
            if latency is None or (sender is not None and ends[sender] + latency > free):
                before = sender
        waits.append(before)
        results += [number] * len(receivers)
        ends.append(end)
        last[rank] = number
    return waits
