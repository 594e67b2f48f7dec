"""The order in which the actions of all ranks can run, or the deadlock that stops them. No times here.

An action waits for the action before it on its rank, and for its inputs from other stages.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from picotron.console import UserError
from workbench.schedules.actions import Action, AnyAction, Schedule


class Event(NamedTuple):
    """An action in the order of `run_order`. Results have numbers in that order: each part of an action has one.

    Args:
        rank: the rank that runs the action.
        sources: numbers of the results that it needs from other stages.
        receivers: the ranks that need its results, one for each part; by default its own rank.
    """

    rank: int
    action: AnyAction
    sources: Sequence[int]
    receivers: Sequence[int]


class Wait(NamedTuple):
    """A rank that waits at its next action for another action, which is on rank `other`."""

    rank: int
    action: AnyAction
    awaited: AnyAction
    other: int


class Deadlock(UserError):
    """A cycle of waits.

    Args:
        schedule: the schedule that deadlocks.
        waits: what the ranks of the cycle wait for: each for the next one, and the last one for the first.
        events: the actions that can run before the deadlock.
    """

    def __init__(self, schedule: Schedule, waits: Sequence[Wait], events: Sequence[Event]) -> None:
        chain = ", which waits ".join(f"at {wait.action} for {wait.awaited} of pp rank {wait.other}" for wait in waits)
        following = [*waits[1:], waits[0]]
        remedies = [
            f"put {_moved(schedule.programs[wait.other], wait.awaited, then.action)} in the program of pp rank {wait.other}"
            for wait, then in zip(waits, following, strict=True)
            if wait.awaited != then.action
        ]
        # If every awaited action is the next one of its rank, overlapped pairs wait for each other.
        remedies.append(f"split the pair {waits[0].action} into two actions")
        super().__init__(f"deadlock: pp rank {waits[0].rank} waits {chain}; {remedies[0]}")
        self.schedule, self.waits, self.events = schedule, waits, events


def _moved(program: Sequence[AnyAction], awaited: AnyAction, then: AnyAction) -> str:
    """Say which of two actions to move: an action cannot come before others of its stage and micro-batch."""
    between = program[program.index(then) : program.index(awaited)]
    own = {(part.stage, part.micro_batch) for part in awaited.parts}
    is_bound = any((part.stage, part.micro_batch) in own for action in between for part in action.parts)
    return f"{then} after {awaited}" if is_bound else f"{awaited} before {then}"


def run_order(schedule: Schedule) -> list[Event]:
    """Return the actions of all ranks in an order in which they can run.

    Args:
        schedule: a complete schedule; `checker.check` finds missing actions.

    Raises:
        Deadlock: the schedule deadlocks. The message names the ranks and actions that wait for each other.
    """
    events: list[Event] = []
    numbers: dict[Action, int] = {}  # of the results so far
    waiting: dict[Action, int] = {}  # the rank that waits for a result
    owner = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    done, ready = [0] * schedule.pp, list(range(schedule.pp))
    while ready:
        rank = ready.pop()
        program = schedule.programs[rank]
        while done[rank] < len(program):
            action = program[done[rank]]
            sources = [source for part in action.parts if (source := schedule.source(part))]
            if missing := [source for source in sources if source not in numbers]:
                waiting[min(missing)] = rank
                break
            receivers = []
            for part in action.parts:
                target, result = schedule.target(part), part.result
                receivers.append(rank if target is None else owner[target])
                numbers[result] = len(numbers)
                if result in waiting:
                    ready.append(waiting.pop(result))
            events.append(Event(rank, action, [numbers[source] for source in sources], receivers))
            done[rank] += 1
    if waiting:
        raise Deadlock(schedule, _cycle(schedule, done, waiting), events)
    return events


def _cycle(schedule: Schedule, done: Sequence[int], waiting: Mapping[Action, int]) -> list[Wait]:
    """Follow the waits. Each rank with actions left waits for another such rank, so the waits contain a cycle."""
    waits: dict[int, Wait] = {}
    for source, rank in waiting.items():
        other = schedule.rank_of(source.stage)
        left = schedule.programs[other][done[other] :]
        awaited = next(action for action in left for part in action.parts if part.result == source)
        waits[rank] = Wait(rank, schedule.programs[rank][done[rank]], awaited, other)
    path = [min(waits)]
    while (rank := waits[path[-1]].other) not in path:
        path.append(rank)
    return [waits[rank] for rank in path[path.index(rank) :]]
