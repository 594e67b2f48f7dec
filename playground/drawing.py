"""What the page needs to draw a schedule: first what does not depend on times, then a step of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from workbench.drawing.draw_svg import COLOURS, lighter
from workbench.schedules.actions import AnyAction, Schedule
from workbench.schedules.order import Event, run_order
from workbench.schedules.search import stage_sizes
from workbench.schedules.simulate import Timeline, activations, computes
from workbench.schedules.trace import waited_for

Drawing = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Structure:
    """A schedule with all that does not depend on times.

    Args:
        name: its name; for a schedule that was searched, where it comes from.
        events: the order of its actions.
        sketch: the result of `sketch`.
    """

    name: str
    schedule: Schedule
    events: list[Event]
    sketch: Drawing

    @classmethod
    def of(
        cls, name: str, schedule: Schedule, deferred: float = 1.0, sizes: Sequence[float] | None = None
    ) -> "Structure":
        return cls(name, schedule, run_order(schedule), sketch(schedule, schedule.programs, deferred, sizes))


def sketch(
    schedule: Schedule,
    programs: Sequence[Sequence[AnyAction]],
    deferred: float = 1.0,
    sizes: Sequence[float] | None = None,
) -> Drawing:
    """Return what does not depend on times. Lists with an item for each rank have lists with one for each action.
    Activations are None during and after a message.

    Args:
        programs: what the ranks run: the programs of the schedule, or those of a recorded step, with messages.
        deferred, sizes: see `fits`.
    """
    chunks = schedule.chunks
    units = dict(enumerate(stage_sizes(schedule, sizes)))
    kept = {stage: deferred * size for stage, size in units.items()}
    levels = []
    for program in programs:
        computed = activations([action for action in program if computes(action)], units, kept)
        levels.append([next(computed) if computes(action) else (None, None) for action in program])
    return {
        "pp": schedule.pp,
        "micro_batches": schedule.micro_batches,
        "chunks": chunks,
        "placement": schedule.placement,
        "actions": [[str(action) for action in program] for program in programs],
        "during": [[during for during, _ in rank] for rank in levels],
        "after": [[after for _, after in rank] for rank in levels],
        "peaks": [max((during for during, _ in rank if during is not None), default=0) for rank in levels],
        "colours": {kind: [lighter(each, chunk / chunks) for chunk in range(chunks)] for kind, each in COLOURS.items()},
    }


def times(step: Timeline) -> Drawing:
    """Return the times of a step's spans, in lists as in `sketch`, and its key figures."""
    return {
        "starts": [[span.start for span in rank] for rank in step.spans],
        "ends": [[span.end for span in rank] for rank in step.spans],
        "step_time": step.step_time,
        "bubble": step.bubble,
        "idle": step.idle,
    }


def waits(events: Sequence[Event], step: Timeline, latency: float | None = None) -> list[int]:
    """Return what each span waited for, see `waited_for`, or -1. Spans are counted rank by rank; messages have none."""
    offset, places, computed = 0, [], []  # for each rank, the numbers of its actions, and their spans
    for rank in step.spans:
        own = [(offset + i, span) for i, span in enumerate(rank) if computes(span.action)]
        places.append(iter([number for number, _ in own]))
        computed.append([span for _, span in own])
        offset += len(rank)
    numbers: list[int] = []  # of the events
    found = [-1] * offset
    for event, before in zip(events, waited_for(events, Timeline(computed), latency), strict=True):
        numbers.append(number := next(places[event.rank]))
        if before is not None:
            found[number] = numbers[before]
    return found
