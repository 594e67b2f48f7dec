"""Simulation of a schedule: step time, and the idle time and activations of each rank. No torch, no processes.

A rank runs its actions in order, each as soon as the rank is free and the action's input has arrived. A message leaves
when the action that produces it ends and the messages before it, from the same rank to the same rank, have left. While
it travels, both ranks continue to compute. (Not so in `train_step_pipeline_afab` and `train_step_pipeline_1f1b`, where
they wait for it, see `Costs.waits`.)
"""

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from workbench.schedules.actions import Action, AnyAction, Overlapped, Schedule
from workbench.schedules.order import Event, run_order

CostKey = tuple[tuple[str, int], ...]  # kind and stage of an action's parts: the time depends on no micro-batch


def cost_key(action: AnyAction) -> CostKey:
    if isinstance(action, Overlapped):
        return cost_key(action.forward) + cost_key(action.backward)
    return ((action.kind, action.stage),)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The times of actions and messages, in any unit: seconds, or forwards of a stage.

    Args:
        F, B, I, W: time of an action in a stage of weight 1. A split backward can be slower than a full one: I + W > B.
        overlapped: time of an overlapped pair, as a fraction of the sum F + B; 1 if overlapping saves no time.
        p2p: latency of a message from one rank to another.
        transfer: time in which a message occupies the link between two ranks: its size, divided by the bandwidth.
        weights: relative time of each stage, see `stages.stage_weights`; by default 1.
        measured: measured times of actions, by `key`; they replace the times that follow from the fields above.
        kept: (stage, micro-batch) that keep their activations, so that their actions have times of their own.
        waits: whether a rank waits until each message that it sends or receives has arrived. A message to a rank and
            the next message from that rank travel together.
    """

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    overlapped: float = 1.0
    p2p: float = 0.0
    transfer: float = 0.0
    weights: Sequence[float] | None = None
    measured: Mapping[CostKey, float] = dataclasses.field(default_factory=dict)
    kept: Collection[tuple[int, int]] = ()
    waits: bool = False

    def key(self, action: AnyAction) -> CostKey:
        """Return what the time of an action depends on. A stage whose activations are kept is written as ~stage."""
        if not self.kept:
            return cost_key(action)
        return tuple((p.kind, ~p.stage if (p.stage, p.micro_batch) in self.kept else p.stage) for p in action.parts)

    def of(self, action: AnyAction) -> float:
        if (key := self.key(action)) in self.measured:
            return self.measured[key]
        if isinstance(action, Overlapped):
            return self.overlapped * (self.of(action.forward) + self.of(action.backward))
        weight = 1.0 if self.weights is None else self.weights[action.stage]
        return weight * {"F": self.F, "B": self.B, "I": self.I, "W": self.W}[action.kind]


class Span(NamedTuple):
    """An action with the times of its start and its end."""

    action: AnyAction
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of all ranks, simulated or measured.

    Args:
        spans: the spans of each rank, in order; times are relative to the beginning of the step.
        sizes: the activations of a micro-batch in each stage, in any unit, such as bytes. By default, the unit is one
            micro-batch in all stages of a rank.
        deferred: fraction of a stage's activations that is kept between I and W.
    """

    spans: Sequence[Sequence[Span]]
    sizes: Sequence[float] | None = None
    deferred: float = 1.0

    @property
    def programs(self) -> list[list[AnyAction]]:
        """The computations of each rank. (Messages and reductions are not computations.)"""
        return [[span.action for span in rank if computes(span.action)] for rank in self.spans]

    @property
    def memory_unit(self) -> str:
        return "micro-batches" if self.sizes is None else "in the given unit"

    @property
    def step_time(self) -> float:
        return max(span.end for rank in self.spans for span in rank)

    @property
    def idle(self) -> list[float]:
        """The time of the step in which each rank computes nothing."""
        step_time = self.step_time
        return [step_time - sum(end - start for a, start, end in rank if computes(a)) for rank in self.spans]

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle, 0 to 1."""
        return sum(self.idle) / (len(self.spans) * self.step_time)


def computes(action: AnyAction) -> bool:
    return isinstance(action, Overlapped) or action.kind in ("F", "B", "I", "W")


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Compute when each action of a schedule runs. By default, F, I and W take 1, B takes 2 and messages take no time.

    Args:
        schedule: a complete schedule; `checker.check` finds missing actions.
    """
    costs = costs or Costs()
    return (
        _simulate_waiting(schedule, costs) if costs.waits else simulate_events(run_order(schedule), schedule.pp, costs)
    )


def simulate_events(events: Sequence[Event], pp: int, costs: Costs) -> Timeline:
    """Compute when the events of `run_order` take place. The order can be reused for other costs."""
    spans: list[list[Span]] = [[] for _ in range(pp)]
    free = [0.0] * pp  # when each rank is free
    arrival: list[float] = []  # when each result is on the rank that needs it
    link_free: dict[tuple[int, int], float] = defaultdict(float)  # by sender and receiver
    times: dict[CostKey, float] = {}
    for rank, action, sources, receivers in events:
        if (key := costs.key(action)) not in times:
            times[key] = costs.of(action)
        start = free[rank]
        for source in sources:
            start = max(start, arrival[source])
        free[rank] = end = start + times[key]
        spans[rank].append(Span(action, start, end))
        for receiver in receivers:
            if receiver == rank:
                arrival.append(end)
            else:
                link_free[rank, receiver] = max(end, link_free[rank, receiver]) + costs.transfer
                arrival.append(link_free[rank, receiver] + costs.p2p)
    return Timeline(spans)


Message = tuple[int, int, Action]  # sender, receiver and result


def _with_messages(schedule: Schedule, rank: int) -> Iterator[AnyAction | list[Message]]:
    """Yield the actions of a rank, and between them the messages that it waits for together."""
    sent: list[Message] = []
    for action in schedule.programs[rank]:
        sources = [source for part in action.parts if (source := schedule.source(part)) is not None]
        owners = [schedule.rank_of(source.stage) for source in sources]
        received = [(owner, rank, each) for owner, each in zip(owners, sources, strict=True) if owner != rank]
        if {peer for _, peer, _ in sent} == {peer for peer, _, _ in received}:
            sent, received = sent + received, []
        yield from (each for each in (sent, received) if each)
        yield action
        targets = [(part, schedule.target(part)) for part in action.parts]
        sent = [
            (rank, peer, part.result)
            for part, target in targets
            if target is not None and (peer := schedule.rank_of(target)) != rank
        ]
    if sent:
        yield sent


def _simulate_waiting(schedule: Schedule, costs: Costs) -> Timeline:
    """Compute when each action runs if ranks wait for their messages: a message leaves when both ends wait for it."""
    programs = [deque(_with_messages(schedule, rank)) for rank in range(schedule.pp)]
    spans: list[list[Span]] = [[] for _ in programs]
    free = [0.0] * schedule.pp
    waiting: dict[Message, dict[int, float]] = defaultdict(dict)  # since when each end waits
    ready = deque(range(schedule.pp))
    while ready:
        rank = ready.popleft()
        while programs[rank]:
            next_one = programs[rank][0]
            if not isinstance(next_one, list):
                spans[rank].append(Span(next_one, free[rank], free[rank] + costs.of(next_one)))
                free[rank] = spans[rank][-1].end
            else:
                for message in next_one:
                    if rank not in waiting[message]:
                        waiting[message][rank] = free[rank]
                        ready.append(sum(message[:2]) - rank)  # the other end
                if any(len(waiting[message]) == 1 for message in next_one):
                    break
                left = max(max(waiting[message].values()) for message in next_one)
                free[rank] = left + costs.transfer + costs.p2p
            programs[rank].popleft()
    if any(programs):
        raise ValueError("ranks wait for each other's messages: this order of actions needs messages that overlap")
    return Timeline(spans)


def stage_of(action: Action) -> int:
    return action.stage


def peak_activations(
    program: Sequence[AnyAction],
    sizes: Mapping[Any, int] | None = None,
    deferred: Mapping[Any, int] | None = None,
    temporary: Mapping[tuple[str, Any], int] | None = None,
    key: Callable[[Action], Any] = stage_of,
) -> int:
    """Return the most activations that a rank holds at a time, in units of one micro-batch in one stage.

    A forward allocates a unit when it starts, and its B frees the unit when it ends. After an I, its W needs a unit of
    about the same size, which it frees when it ends. An overlapped pair needs the units of both its parts. A forward
    without a backward, in an evaluation, keeps no activations.

    Args:
        sizes: size of the unit of an action, by its key; by default 1.
        deferred: size of the unit between I and W; by default that of the whole unit.
        temporary: size of what an action needs in addition while it runs, by its (kind, key); by default 0.
        key: function that returns the key of an action; by default its stage.
    """
    more = temporary or {}
    levels = zip(program, activations(program, sizes, deferred, key), strict=True)
    return max((live + max(more.get((p.kind, key(p)), 0) for p in a.parts) for a, (live, _) in levels), default=0)


def activations(
    program: Sequence[AnyAction],
    sizes: Mapping[Any, Any] | None,
    deferred: Mapping[Any, Any] | None,
    key: Callable[[Action], Any] = stage_of,
) -> Iterator[tuple[Any, Any]]:
    """Yield the activations that a rank holds during each action and after it, see `peak_activations`."""
    parts = [part for action in program for part in action.parts]
    kept = {(part.stage, part.micro_batch) for part in parts if part.kind in ("B", "W")}
    units = dict.fromkeys(map(key, parts), 1) if sizes is None else sizes
    freed = {("B", unit): size for unit, size in units.items()}
    for unit, size in (deferred or units).items():
        freed |= {("I", unit): units[unit] - size, ("W", unit): size}
    live = 0
    for action in program:
        for part in action.parts:
            if part.kind == "F" and (part.stage, part.micro_batch) in kept:
                live += units[key(part)]
        during = live
        for part in action.parts:
            live -= freed.get((part.kind, key(part)), 0)
        yield during, live


def memory_curves(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return the activations of each rank as steps: (time, activations from that time on), see `peak_activations`."""
    curves = []
    for program, spans in zip(timeline.programs, timeline.spans, strict=True):
        stages = {part.stage for action in program for part in action.parts}
        sizes = {stage: timeline.sizes[stage] if timeline.sizes else 1 / len(stages) for stage in stages}
        kept = {stage: size * timeline.deferred for stage, size in sizes.items()}
        computations = [span for span in spans if computes(span.action)]
        levels = zip(computations, activations(program, sizes, kept), strict=True)
        steps = [step for span, (during, after) in levels for step in ((span.start, during), (span.end, after))]
        curves.append([(0.0, 0.0), *((time, round(live, 9)) for time, live in steps)])
    return curves


def tick_distance(duration: float, most: int) -> float:
    """Return the distance of the numbers on a time axis: 1, 2 or 5 times a power of ten, so that at most `most` fit."""
    power = 10.0 ** math.floor(math.log10(duration / most))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * most >= duration)


def summary(timeline: Timeline) -> dict[str, str]:
    """Return key figures of a timeline as text. The unit of activations is that of `memory_curves`."""
    peaks = [max(live for _, live in curve) for curve in memory_curves(timeline)]
    return {
        "step time": f"{timeline.step_time:.4g}",
        "bubble": f"{timeline.bubble:.1%}",
        "peak activations by pp rank": " ".join(f"{peak:.4g}" for peak in peaks),
    }


def measured_costs(timeline: Timeline) -> Costs:
    """Return the mean time of each action, to simulate with. (Messages cost nothing here: computations hide them.)"""
    times: dict[CostKey, list[float]] = defaultdict(list)
    for rank in timeline.spans:
        for action, start, end in rank:
            times[cost_key(action)].append(end - start)
    return Costs(measured={key: mean(each) for key, each in times.items()})
