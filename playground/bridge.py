"""The Python side of the playground: JSON in, JSON out. Runs in a browser, in Pyodide, and in the tests, in CPython.

Everything that the page shows is computed here, by picotron's own modules; JavaScript only draws it.
`call` names one of FUNCTIONS. A request is the state of the page's controls, see `requests.Request`.
"""

import dataclasses
import inspect
import json
from typing import Any

from picotron.console import UserError
from playground.drawing import Drawing, Structure, sketch, times, waits
from playground.memory import memory
from playground.puzzles import PUZZLES, puzzle
from playground.requests import FieldError, Request, stage_costs, structure
from playground.score import score
from playground.training import training_command
from workbench.drawing.draw_svg import COLOURS, MEANING
from workbench.schedules.order import Deadlock
from workbench.schedules.schedule_csv import as_csv
from workbench.schedules.schedules import SCHEDULES
from workbench.schedules.search import ROUNDING
from workbench.schedules.simulate import Costs, simulate_events
from workbench.schedules.trace import parse_trace, timeline_costs


def call(function: str, argument: str) -> str:
    """Call one of FUNCTIONS.

    Args:
        argument: a request as JSON, or the contents of a trace.

    Returns:
        The result as JSON; for a mistake of the reader {"error": SENTENCE}, with the "field" of the control if there is
        one, and for a deadlock with its drawing.
    """
    try:
        result = FUNCTIONS[function](argument)
    except Deadlock as deadlock:
        result = {"error": str(deadlock), "deadlock": draw_deadlock(deadlock)}
    except FieldError as error:
        result = {"error": str(error), "field": error.field}
    except UserError as error:
        result = {"error": str(error)}
    return json.dumps(result)


def start(_: str) -> dict[str, Any]:
    """Return what does not change: schedules, puzzles, and the colours and meaning of the kinds of actions."""
    return {"schedules": list(SCHEDULES), "puzzles": list(PUZZLES), "colours": COLOURS, "meaning": MEANING}


def timeline(argument: str) -> Drawing:
    """Return the simulated step of a request."""
    request = Request.of(argument)
    found = structure(request)
    step = simulate_events(found.events, found.schedule.pp, costs_of(request, found))
    return {"name": found.name, **found.sketch, **times(step), "waits": waits(found.events, step)}


def costs_of(request: Request, found: Structure) -> Costs:
    return stage_costs(request, found.schedule.pp, (found.schedule.chunks, found.schedule.placement))


def draw_deadlock(deadlock: Deadlock) -> dict[str, Any]:
    """Return what the ranks of a deadlock's cycle wait for, and a drawing with the times of the actions before it."""
    schedule = deadlock.schedule
    weights = [1 / schedule.chunks] * schedule.num_stages
    step = simulate_events(deadlock.events, schedule.pp, Costs(weights=weights))
    cycle = [
        {"rank": wait.rank, "action": str(wait.action), "awaited": str(wait.awaited), "other": wait.other}
        for wait in deadlock.waits
    ]
    return {"cycle": cycle, "drawing": {**sketch(schedule, schedule.programs), **times(step)}}


def ranking(argument: str) -> list[dict[str, Any]]:
    """Return the key figures of all hand-made schedules for a request's numbers."""
    request = Request.of(argument)
    return [figures(request, name) for name in SCHEDULES]


def best(argument: str) -> dict[str, Any]:
    """Return the key figures of the schedule that is made to measure."""
    return figures(Request.of(argument), "auto")


def figures(request: Request, name: str) -> dict[str, Any]:
    """Return the key figures of a schedule for a request's numbers, or why it cannot be built."""
    request = dataclasses.replace(request, schedule=name)
    try:
        found = structure(request)
        step = simulate_events(found.events, found.schedule.pp, costs_of(request, found))
    except UserError as error:
        return {"schedule": name, "error": str(error)}
    return {
        "schedule": name,
        "name": found.name,
        "chunks": found.schedule.chunks,
        "placement": found.schedule.placement,
        "step_time": step.step_time,
        "bubble": step.bubble,
        "peak": max(found.sketch["peaks"]),
        "fits": not request.memory or max(found.sketch["peaks"]) <= request.memory * (1 + ROUNDING),
    }


def edit(argument: str) -> dict[str, str]:
    """Return a request's schedule as text for the editor: as CSV and, if it is hand-made, its function."""
    request = Request.of(argument)
    texts = {"csv": as_csv(structure(request).schedule.programs)}
    if request.schedule in SCHEDULES:
        texts["python"] = inspect.getsource(SCHEDULES[request.schedule].program)
    return texts


def train(argument: str) -> dict[str, str]:
    """Return the command that trains with a request's schedule, and the file that it needs, if any."""
    request = Request.of(argument)
    schedule = structure(request).schedule
    file = "" if request.schedule in SCHEDULES else as_csv(schedule.programs)
    return {"command": training_command(request, schedule), "file": file}


def trace(contents: str) -> dict[str, Drawing]:
    """Return a recorded step, and the simulation of its schedule with the mean times of its actions, in seconds."""
    measured = parse_trace(contents.encode(), "the file")
    schedule, costs = timeline_costs(measured, "in the file")
    programs = [[span.action for span in rank] for rank in measured.spans]
    simulated = Structure.of("simulated", schedule)
    events, step = simulated.events, simulate_events(simulated.events, schedule.pp, costs)
    waited = waits(events, measured, latency=costs.p2p)
    return {
        "measured": {"name": "measured", **sketch(schedule, programs), **times(measured), "waits": waited},
        "simulated": {"name": "simulated", **simulated.sketch, **times(step), "waits": waits(events, step)},
    }


FUNCTIONS = {
    function.__name__: function
    for function in (start, timeline, ranking, best, edit, train, trace, memory, score, puzzle)
}
