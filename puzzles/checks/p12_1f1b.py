"""Check of puzzle 12: the schedule is complete, does not deadlock, and is as fast and as small as 1F1B."""

import itertools
from types import ModuleType

from picotron.console import UserError
from puzzles.report import Report, Wrong, kind, require
from workbench.drawing.draw_svg import as_svg
from workbench.schedules.actions import Action, AnyAction, Schedule, parse_action
from workbench.schedules.checker import check as check_schedule
from workbench.schedules.simulate import peak_activations, simulate


def schedule_of(learner: ModuleType, report: Report, p: int, m: int, where: str, *arguments: int | float) -> Schedule:
    """Return the schedule of the learner's programs, functions of the rank and of other arguments, if it can run."""
    programs: list[list[AnyAction]] = [[] for _ in range(p)]
    for rank, actions in enumerate(programs):
        names = report.ask(learner, "program", rank, *arguments)
        require(isinstance(names, list | tuple), f"{where}, rank {rank}: expected a list, got {kind(names)}")
        for name in names:
            try:
                actions.append(parse_action(name if isinstance(name, str) else repr(name)))
            except ValueError:
                require(False, f'{where}, rank {rank}: {name!r} is not an action such as "2F0"')
    try:
        check_schedule(schedule := Schedule(programs, m))
    except UserError as error:
        raise Wrong(f"{where}: {str(error).replace(' (loop placement)', '')}") from None
    return schedule


def only_forwards_and_backwards(schedule: Schedule, where: str) -> None:
    """Raise Wrong if a schedule has actions of other kinds than F and B."""
    actions = itertools.chain(*schedule.programs)
    only = all(isinstance(action, Action) and action.kind in "FB" for action in actions)
    require(only, f"{where}: expected only the actions F and B; the other kinds are those of puzzle 13")


def check(learner: ModuleType, _: object, report: Report) -> None:
    for p, m in ((2, 3), (4, 2), (1, 3), (8, 20), (4, 8)):
        where = f"p = {p}, m = {m}"
        schedule = schedule_of(learner, report, p, m, where, p, m)
        timeline = simulate(schedule)
        report.picture = as_svg(timeline)
        for rank, actions in enumerate(timeline.programs):
            peak, most = peak_activations(actions), min(p - rank, m)
            sentence = f"{where}: rank {rank} holds the activations of {peak} micro-batches, expected at most {most}"
            require(peak <= most, sentence)
        step = 3 * (m + p - 1)  # of AFAB, as each rank has m forwards and m backwards, see the statement
        sentence = f"{where}: the step takes as long as {timeline.step_time:g} forwards, expected at most {step}"
        require(timeline.step_time <= step, sentence)
        only_forwards_and_backwards(schedule, where)
