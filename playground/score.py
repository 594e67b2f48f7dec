"""The scoreboard of the playground: a schedule among the published ones, by the code that writes docs/scoreboard.md."""

import functools
import json
from typing import Any

from docs.programs.scoreboard import entries
from playground.requests import Request, structure
from workbench.drawing.score import Setting, bound, peak, published, ranking, settings
from workbench.schedules.actions import Schedule

OWN = "yours"


def score(argument: str) -> dict[str, Any]:
    """Return the place of a request's schedule under one setting, of as many as `count` says.

    Args:
        argument: a request as JSON, with the number of the `setting` among those of the schedule's size.

    Raises:
        UserError: no setting has the schedule's numbers of ranks, micro-batches and stages.
    """
    values = json.loads(argument)
    number = values.pop("setting")
    schedule = structure(Request(**values)).schedule
    possible = settings(schedule.pp, schedule.micro_batches, schedule.chunks)
    setting = possible[number]
    result = {"count": len(possible), "memory": setting.memory, "limit": setting.limit, "message": setting.message}
    result |= {"times": setting.times, "bound": bound(setting), "peak": peak(schedule)}
    scores = ranking(setting, [(OWN, schedule), *others(setting)])
    return {**result, "scores": [each._asdict() for each in scores]}


@functools.cache
def others(setting: Setting) -> list[tuple[str, Schedule]]:
    """Return what a schedule is ranked with: the hand-made ones, the result of the search, and all entries."""
    return [*published(setting), *((entry.name, entry.schedule) for entry in entries())]
