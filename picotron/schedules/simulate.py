"""How long a schedule takes, how long each rank is idle, and how many activations it holds. No torch, no processes.

A rank does its actions in order, each as soon as the rank is free and the action's input is there. A message leaves
when the action that makes it ends; while it travels, both ranks go on computing.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from picotron.errors import UserError
from picotron.schedules.actions import Action, AnyAction, Overlapped, Schedule

Work = tuple[tuple[str, int], ...]  # kind and stage of an action's parts: what all its micro-batches have in common


def work_of(action: AnyAction) -> Work:
    return tuple((part.kind, part.stage) for part in action.parts)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The time that actions take, in any unit: seconds, or forwards of a stage.

    Args:
        F, B, I, W: of an action in a stage of weight 1. One that splits a backward may pay for it: I + W > B.
        overlapped: what part of the sum F + B an overlapped pair takes. 1: nothing is gained.
        p2p: of a message from one rank to another.
        weights: of each stage; by default 1. `stages.stage_weights` has those of a model's stages.
        measured: the time of actions that have been measured, by `work_of`; the others' follow from the rest.
    """

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    overlapped: float = 1.0
    p2p: float = 0.0
    weights: Sequence[float] | None = None
    measured: Mapping[Work, float] = dataclasses.field(default_factory=dict)

    def of(self, action: AnyAction) -> float:
        if (work := work_of(action)) in self.measured:
            return self.measured[work]
        if isinstance(action, Overlapped):
            return self.overlapped * (self.of(action.forward) + self.of(action.backward))
        weight = 1.0 if self.weights is None else self.weights[action.stage]
        return weight * {"F": self.F, "B": self.B, "I": self.I, "W": self.W}[action.kind]


class Span(NamedTuple):
    """When an action ran."""

    action: AnyAction
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of all ranks, simulated or measured.

    Args:
        spans: by rank, in order; times since the step began.
    """

    spans: Sequence[Sequence[Span]]

    @property
    def programs(self) -> list[list[AnyAction]]:
        """What each rank computes. (Messages and reductions are no computation.)"""
        return [[span.action for span in rank if computes(span.action)] for rank in self.spans]

    @property
    def step_time(self) -> float:
        return max(span.end for rank in self.spans for span in rank)

    @property
    def idle(self) -> list[float]:
        """How much of the step's time each rank computes nothing."""
        step_time = self.step_time
        return [step_time - sum(end - start for a, start, end in rank if computes(a)) for rank in self.spans]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is idle, 0 to 1."""
        return sum(self.idle) / (len(self.spans) * self.step_time)


def computes(action: AnyAction) -> bool:
    return all(part.kind in ("F", "B", "I", "W") for part in action.parts)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on the clock. By default F, I and W take 1, B takes 2 and messages nothing.

    Args:
        schedule: a whole one: `checker.check` finds what is missing.

    Raises:
        UserError: the schedule deadlocks. The sentence says who waits for whom.
    """
    costs = costs or Costs()
    todo = [deque(program) for program in schedule.programs]
    spans: list[list[Span]] = [[] for _ in todo]
    finished: dict[Action, float] = {}  # when each result was there
    while any(todo):
        stuck = True
        for rank, queue in enumerate(todo):
            while queue and finished.keys() >= (sources := _sources(schedule, queue[0])):
                action, stuck = queue.popleft(), False
                arrivals = [finished[s] + costs.p2p * (schedule.rank_of(s.stage) != rank) for s in sources]
                start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
                spans[rank].append(Span(action, start, start + costs.of(action)))
                finished |= {part.result: spans[rank][-1].end for part in action.parts}
        if stuck:
            raise UserError(_deadlock(schedule, todo, finished))
    return Timeline(spans)


def _sources(schedule: Schedule, action: AnyAction) -> set[Action]:
    return {source for part in action.parts if (source := schedule.source(part))}


def _deadlock(schedule: Schedule, todo: Sequence[deque[AnyAction]], finished: Mapping[Action, float]) -> str:
    """Each rank that is not done waits for another such rank, so whoever follows them goes round in a circle."""
    waits: dict[int, tuple[AnyAction, AnyAction, int]] = {}  # rank: at which action, for which one, of which rank
    for rank, queue in enumerate(todo):
        if queue:
            source = min(_sources(schedule, queue[0]) - finished.keys())
            other = schedule.rank_of(source.stage)
            asked = next(action for action in todo[other] for part in action.parts if part.result == source)
            waits[rank] = queue[0], asked, other
    path = [min(waits)]
    while (rank := waits[path[-1]][2]) not in path:
        path.append(rank)
    circle = [waits[rank] for rank in path[path.index(rank) :]]
    told = ", which waits ".join(f"at {at} for {asked} of pp rank {other}" for at, asked, other in circle)
    remedies = [
        f"put {asked} before {waits[other][0]} in the program of pp rank {other}"
        for _, asked, other in circle
        if asked != waits[other][0]
    ]
    remedies.append(f"take the pair {circle[0][0]} apart")  # only pairs can wait for each other as a whole
    return f"deadlock: pp rank {rank} waits {told}; {remedies[0]}"


def peak_activations(program: Sequence[AnyAction], sizes: Mapping[int, int] | None = None) -> int:
    """How many activations a rank holds at most, in units of those of one micro-batch in one stage.

    A forward takes a unit when it starts. A B gives it back when it ends. An I gives nothing back, as it keeps what its
    W needs; that W gives the unit back when it ends. In an overlapped pair both units are there. A forward without a
    backward, in an evaluation, keeps nothing.

    Args:
        sizes: of a unit in each stage; by default 1.
    """
    parts = [part for action in program for part in action.parts]
    kept = {(part.stage, part.microbatch) for part in parts if part.kind in ("B", "W")}
    units = dict.fromkeys((part.stage for part in parts), 1) if sizes is None else sizes
    live = peak = 0
    for action in program:
        live += sum(units[p.stage] for p in action.parts if p.kind == "F" and (p.stage, p.microbatch) in kept)
        peak = max(peak, live)
        live -= sum(units[p.stage] for p in action.parts if p.kind in ("B", "W"))
    return peak


def summary(timeline: Timeline) -> dict[str, str]:
    """What a timeline amounts to, for people. Activations are those of one micro-batch in all stages of a rank."""
    stages = [len({part.stage for action in program for part in action.parts}) for program in timeline.programs]
    peaks = [peak_activations(program) / max(n, 1) for program, n in zip(timeline.programs, stages, strict=True)]
    return {
        "step time": f"{timeline.step_time:.4g}",
        "bubble": f"{timeline.bubble:.1%}",
        "peak activations by rank": " ".join(f"{peak:.3g}" for peak in peaks),
    }


def measured_costs(timeline: Timeline) -> Costs:
    """What actions took on average, to simulate with. (The time of messages is not in it: computations hide it.)"""
    times: dict[Work, list[float]] = defaultdict(list)
    for rank in timeline.spans:
        for action, start, end in rank:
            times[work_of(action)].append(end - start)
    return Costs(measured={work: mean(each) for work, each in times.items()})
