"""The times of a recorded step, to simulate and to search schedules with."""

import dataclasses
import itertools
from pathlib import Path
from statistics import median_low

from picotron.schedules.actions import Schedule
from picotron.schedules.schedule_csv import assemble
from picotron.schedules.simulate import Costs, Timeline, measured_costs
from picotron.schedules.trace import read_trace


def recorded_costs(run_dir: str | Path, step: int | None = None) -> tuple[Schedule, Costs]:
    """Return the schedule of a recorded step, and the times of all kinds of actions in its stages, in seconds.

    If the recorded schedule splits no backward of a stage, each half is estimated to take half as long as the full one.

    Args:
        step: number of the recorded step, by default the newest.

    Raises:
        UserError: there is no such step, or its trace cannot be read or is incomplete.
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
