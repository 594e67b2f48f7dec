"""The critical path of a simulated step: what each action waited for. No torch."""

from collections.abc import Sequence

from picotron.schedules.order import Event
from picotron.schedules.simulate import Timeline


def waited_for(events: Sequence[Event], timeline: Timeline) -> list[int | None]:
    """Return for each event the number of the event that it waited for last, or None if it waited for none: the one
    before it on its rank if it starts when that one ends, else the one on another rank whose message it waits for.

    Going back from the last action to end, these events are the critical path: the step gets shorter only if one of
    them or of the messages between them does. (A message that queues for the link between two ranks counts as long.)

    Args:
        events: the `run_order` of a schedule.
        timeline: the simulation of these events.
    """
    waits: list[int | None] = []
    spans = [iter(rank) for rank in timeline.spans]
    last: list[int | None] = [None] * len(spans)  # the last event on each rank
    ends: list[float] = []  # of the events
    results: list[int] = []  # the event that computes each result
    for number, (rank, _, sources, receivers) in enumerate(events):
        _, start, end = next(spans[rank])
        before = last[rank]
        if start > (0.0 if before is None else ends[before]):
            senders = (results[source] for source in sources)
            before = max((each for each in senders if events[each].rank != rank), key=ends.__getitem__)
        waits.append(before)
        results += [number] * len(receivers)
        ends.append(end)
        last[rank] = number
    return waits
