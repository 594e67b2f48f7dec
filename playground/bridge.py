"""The Python side of the playground: JSON in, JSON out. Runs in a browser, in Pyodide, and in the tests, in CPython.

Everything that the page shows is computed here, by the modules of picotron.schedules; JavaScript only draws it.
`call` names one of FUNCTIONS. A request is the state of the page's controls, see `requests.Request`.
"""

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from picotron.errors import UserError
from picotron.schedules.actions import Schedule
from picotron.schedules.critical_path import waited_for
from picotron.schedules.draw_svg import COLOURS, MEANING, MESSAGE, lighter
from picotron.schedules.order import Deadlock, Event
from picotron.schedules.recorded import timeline_costs
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.search import fits
from picotron.schedules.simulate import Costs, Timeline, activations, computes, simulate, simulate_events
from picotron.schedules.trace import parse_trace
from playground.requests import Request, stage_costs, structure
from playground.training import training_command


def call(function: str, argument: str) -> str:
    """Call one of FUNCTIONS with a text, JSON except for a trace. Returns its result as JSON, or {"error": SENTENCE} for a mistake of
    the reader.
    """
    try:
        return json.dumps(FUNCTIONS[function](argument))
    except Deadlock as deadlock:
        return json.dumps({"error": str(deadlock), "deadlock": draw_deadlock(deadlock)})
    except UserError as error:
        # A schedule in the editor has no name.
        return json.dumps({"error": re.sub(r"^the schedule  ", "the schedule ", str(error))})


def start(_: str) -> dict[str, Any]:
    """Return what does not change: the schedules, with what is known of them, and the kinds of actions."""
    about = {
        name: {
            "about": inspect.getdoc(recipe.program),
            "chunks": recipe.chunks,
            "any_chunks": recipe.any_chunks,
            "has_groups": recipe.has_groups,
        }
        for name, recipe in SCHEDULES.items()
    }
    return {"schedules": about, "colours": COLOURS, "meaning": MEANING, "message": MESSAGE}


def timeline(argument: str) -> dict[str, Any]:
    """Return the simulated step of a request."""
    request = Request.of(argument)
    name, schedule, events = structure(request)
    step = simulate_events(
        events, schedule.pp, stage_costs(request, schedule.pp, (schedule.chunks, schedule.placement))
    )
    return {
        "name": name,
        **drawing(schedule, step, request.deferred),
        "waits": positions(events, waited_for(events, step)),
    }


def drawing(schedule: Schedule, step: Timeline, deferred: float) -> dict[str, Any]:
    """Return what the page needs to draw a step. Lists with an item for each rank have lists with one for each span.
    Activations are None during and after a message.
    """
    units = dict.fromkeys(range(schedule.num_stages), 1 / schedule.chunks)
    kept = dict.fromkeys(units, deferred / schedule.chunks)
    levels = []
    for spans in step.spans:
        computed = iter(activations([span.action for span in spans if computes(span.action)], units, kept))
        levels.append([next(computed) if computes(span.action) else (None, None) for span in spans])
    return {
        "pp": schedule.pp,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "placement": schedule.placement,
        "actions": [[str(span.action) for span in rank] for rank in step.spans],
        "starts": [[span.start for span in rank] for rank in step.spans],
        "ends": [[span.end for span in rank] for rank in step.spans],
        "during": [[during for during, _ in rank] for rank in levels],
        "after": [[after for _, after in rank] for rank in levels],
        "colours": colours(schedule.chunks),
        "step_time": step.step_time,
        "bubble": step.bubble,
        "idle": step.idle,
        "peaks": [max(during for during, _ in rank if during is not None) for rank in levels],
    }


def colours(chunks: int) -> dict[str, list[str]]:
    """Return the colour of each kind of action in each chunk, as in `draw_svg`."""
    return {kind: [lighter(colour, chunk / chunks) for chunk in range(chunks)] for kind, colour in COLOURS.items()}


def positions(events: Sequence[Event], waits: Sequence[int | None]) -> list[list[tuple[int, int] | None]]:
    """Return for each span of each rank the (rank, position) of the one that it waited for."""
    found: list[list[tuple[int, int] | None]] = [[] for _ in range(1 + max(event.rank for event in events))]
    places: list[tuple[int, int]] = []
    for event, wait in zip(events, waits, strict=True):
        places.append((event.rank, len(found[event.rank])))
        found[event.rank].append(None if wait is None else places[wait])
    return found


def draw_deadlock(deadlock: Deadlock) -> dict[str, Any]:
    """Return what the ranks of a deadlock's cycle wait for, and the part of the step that can run before it."""
    schedule = deadlock.schedule
    weights = [1 / schedule.chunks] * schedule.num_stages
    step = simulate_events(deadlock.events, schedule.pp, Costs(weights=weights))
    waits = [
        {"rank": wait.rank, "action": str(wait.action), "awaited": str(wait.awaited), "other": wait.other}
        for wait in deadlock.waits
    ]
    return {"waits": waits, "drawing": drawing(schedule, step, 1.0)}


def ranking(argument: str) -> list[dict[str, Any]]:
    """Return the key figures of all hand-made schedules for a request's numbers, fastest first; those that do not fit
    into memory come last.
    """
    request = Request.of(argument)
    rows = [figures(request.__class__(**{**vars(request), "schedule": name})) for name in SCHEDULES]
    return sorted(rows, key=lambda row: ("error" in row, not row.get("fits"), row.get("step_time")))


def figures(request: Request) -> dict[str, Any]:
    """Return the key figures of a request's schedule, or why it cannot be built."""
    try:
        name, schedule, events = structure(request)
        costs = stage_costs(request, schedule.pp, (schedule.chunks, schedule.placement))
    except UserError as error:
        return {"schedule": request.schedule, "error": str(error)}
    step = simulate_events(events, schedule.pp, costs)
    return {
        "schedule": request.schedule,
        "name": name,
        "chunks": schedule.chunks,
        "placement": schedule.placement,
        "step_time": step.step_time,
        "bubble": step.bubble,
        "peak": max(drawing(schedule, step, request.deferred)["peaks"]),
        "fits": not request.memory or fits(schedule, request.memory, request.deferred),
    }


def searched(argument: str) -> dict[str, Any]:
    """Return the key figures of the schedule that is made to measure."""
    return figures(Request.of(argument))


def edit(argument: str) -> dict[str, str]:
    """Return a request's schedule as text for the editor: as CSV and, if it is hand-made, its function."""
    request = Request.of(argument)
    schedule = structure(request).schedule
    texts = {"csv": as_csv(schedule.programs), "python": ""}
    if request.schedule in SCHEDULES:
        texts["python"] = inspect.getsource(SCHEDULES[request.schedule].program)
    return texts


def train(argument: str) -> dict[str, str]:
    """Return the command that trains with a request's schedule, and the file that it needs, if any."""
    request = Request.of(argument)
    schedule = structure(request).schedule
    file = "" if request.schedule in SCHEDULES else as_csv(schedule.programs)
    return {"command": training_command(request, schedule), "file": file}


def trace(text: str) -> dict[str, Any]:
    """Return a recorded step, and the simulation of its schedule with the mean times of its actions, in seconds."""
    measured = parse_trace(text.encode(), "the file")
    schedule, costs = timeline_costs(measured, "of the file")
    simulated = simulate(schedule, costs)
    return {"measured": drawing(schedule, measured, 1.0), "simulated": drawing(schedule, simulated, 1.0)}


FUNCTIONS = {function.__name__: function for function in (start, timeline, ranking, searched, edit, train, trace)}
