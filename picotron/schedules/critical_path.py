"""The critical path of a step, simulated or measured: what each action waited for. No torch."""

from collections.abc import Sequence

from picotron.schedules.order import Event
from picotron.schedules.simulate import Timeline


def waited_for(events: Sequence[Event], timeline: Timeline, latency: float | None = None) -> list[int | None]:
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
