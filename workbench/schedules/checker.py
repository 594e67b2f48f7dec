"""Check that a schedule is complete and cannot deadlock, and add the messages between ranks.

The computations and messages of all ranks are put in one total order, that of a simulated step, in which a message is a
single event for its sender and its receiver. A rank's program consists of its own events in that order. So the first of
the remaining events can always happen, even in a network where each send waits for its receive, and where a message
waits for earlier messages of the same rank: for all of them, or for those of its process group. All messages from one
rank to another are in one group, so they are received in the order in which they were sent.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

from picotron.console import UserError
from workbench.schedules.actions import Action, AnyAction, Schedule
from workbench.schedules.simulate import Timeline, simulate

MAX_SENDS_IN_FLIGHT = 2  # per receiving rank; each holds the memory of one output
ADDED_AUTOMATICALLY = "messages and reductions are added automatically"


def check(schedule: Schedule) -> Timeline:
    """Check that a schedule is complete and cannot deadlock.

    Returns:
        The timeline of a simulated step.

    Raises:
        UserError: an action is missing, duplicated, on the wrong rank or in the wrong order, or the schedule deadlocks.
    """
    for fault in _faults(schedule):
        raise UserError(fault)
    return simulate(schedule)


def _faults(schedule: Schedule) -> Iterator[str]:
    order: dict[Action, int] = {}  # position of each action in the program of its rank
    for rank, program in enumerate(schedule.programs):
        for number, action in enumerate(program):
            for part in action.parts:
                if fault := _misplaced(schedule, rank, part):
                    yield fault
                if part in order:
                    yield f"pp rank {rank} has {part} twice"
                order[part] = number

    for stage, micro_batch in itertools.product(range(schedule.num_stages), range(schedule.micro_batches)):
        f, b, i, w = (Action(kind, stage, micro_batch) for kind in "FBIW")
        rank = schedule.rank_of(stage)
        if f not in order:
            yield f"pp rank {rank} lacks {f}, the forward of micro-batch {micro_batch} through stage {stage}"
        if schedule.forward_only:
            yield from (f"pp rank {rank} has {a}, but an evaluation has no backwards" for a in (b, i, w) if a in order)
            continue
        if b in order:
            yield from (
                f"pp rank {rank} has both {b}, a full backward, and {half}, half of one"
                for half in (i, w)
                if half in order
            )
        elif i not in order and w not in order:
            yield f"pp rank {rank} lacks {b} (or {i} and {w}), the backward of micro-batch {micro_batch} in stage {stage}"
        elif i not in order or w not in order:
            present, missing = (i, w) if i in order else (w, i)
            yield f"pp rank {rank} has {present}, but lacks {missing}, the other half of that backward"
        for earlier, later in ((f, b), (f, i), (i, w)):
            if earlier in order and later in order and order[earlier] >= order[later]:
                yield f"pp rank {rank} has {later} too early: it must come after {earlier}"


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str | None:
    if action.kind not in ("F", "B", "I", "W"):
        return f"pp rank {rank} has {action}; remove it: {ADDED_AUTOMATICALLY}"
    if action.stage >= schedule.num_stages or action.micro_batch >= schedule.micro_batches:
        return (
            f"pp rank {rank} has {action}, but the schedule has {schedule.num_stages} stages "
            f"and {schedule.micro_batches} micro-batches, both numbered from 0"
        )
    owner = schedule.rank_of(action.stage)
    if rank != owner:
        return f"pp rank {rank} has {action}, but stage {action.stage} is on pp rank {owner} ({schedule.placement} placement)"
    return None


def add_communication(schedule: Schedule) -> list[list[AnyAction]]:
    """Return the programs that ranks run: those of the schedule, with a SEND and a RECV for each result that another
    rank needs, and an R for each stage once its gradients are complete.

    SEND and RECV are placed where the message leaves in a simulated step. So the receiver posts its receive before the
    computation that runs while the message travels.
    """
    timeline = check(schedule)
    spans = [(span.end, rank, span.action) for rank, spans in enumerate(timeline.spans) for span in spans]
    backwards = Counter(part.stage for _, _, action in spans for part in action.parts if part.kind in ("B", "W"))
    programs: list[list[AnyAction]] = [[] for _ in timeline.spans]
    for _, simultaneous in itertools.groupby(sorted(spans, key=lambda span: span[:2]), key=lambda span: span[0]):
        ended = [(rank, action) for _, rank, action in simultaneous]
        for rank, action in ended:
            programs[rank].append(action)
        parts = [(rank, part) for rank, action in ended for part in action.parts]
        for rank, part in parts:
            target = schedule.target(part)
            if target is not None and (receiver := schedule.rank_of(target)) != rank:
                kind = part.result.kind
                programs[rank].append(part._replace(kind=f"SEND_{kind}"))
                programs[receiver].append(Action(f"RECV_{kind}", target, part.micro_batch))
        for rank, part in parts:
            if part.kind in ("B", "W"):
                backwards[part.stage] -= 1
                if backwards[part.stage] == 0:
                    programs[rank].append(Action("R", part.stage))
    return programs
