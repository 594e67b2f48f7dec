"""Search for a schedule: the fastest program for given times of actions and a limit of memory. No torch.

A greedy scheduler simulates a step: whenever a rank is free, it starts the action that can start first. Three knobs
decide between actions, as in the heuristic of Qi et al. 2023 (arXiv:2401.10241, section 3.1): which of F and I comes
first, how far ranks may run ahead with forwards, and how long a W may delay another action. The search tries several
settings of the knobs and all hand-made schedules, and returns the fastest schedule that fits into memory. It uses no
random numbers, so all ranks find the same schedule.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from picotron.errors import UserError
from picotron.schedules.actions import Action, Placement, Schedule
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, Timeline, peak_activations, simulate

Shape = tuple[int, Placement]  # chunks per rank, and placement of the stages
SHAPES: list[Shape] = [(1, "loop"), (2, "loop"), (2, "V")]


class Found(NamedTuple):
    """A schedule that was found, where it comes from (a key of SCHEDULES, or "search"), and how its step was timed."""

    score: float  # the step time, or another objective
    name: str
    schedule: Schedule
    costs: Costs


class Knobs(NamedTuple):
    forward_first: bool  # whether F runs before I if both can start
    slope: float  # number of forwards by which a rank may be less far ahead than the previous rank
    patience: float  # a W may delay the next action by this fraction of its time


KNOBS = list(itertools.starmap(Knobs, itertools.product((True, False), (0.0, 0.5, 1.0, 1.5, 2.0), (0.0, 0.5, 1.0))))


class Greedy:
    """The greedy scheduler. Ranks and stages are numbers, and times are lists, because the search has about a second.

    Args:
        empty: a schedule whose programs are to be found.
        memory: the most activations of a rank, see `peak_activations`.
        costs: times of actions and messages; the time of a pair or a full backward is not used.
    """

    def __init__(self, empty: Schedule, memory: float, costs: Costs, deferred: float) -> None:
        self.empty, self.last, self.m = empty, empty.num_stages - 1, empty.microbatches
        self.memory = memory + 1e-6  # sums of fractions are rounded
        self.change = {"F": 1.0, "I": deferred - 1, "W": -deferred}  # of a rank's activations
        stages = range(empty.num_stages)
        self.owner = [empty.rank_of(stage) for stage in stages]
        self.stages = [empty.stages_of(rank)[::-1] for rank in range(empty.pp)]
        self.time = {kind: [costs.of(Action(kind, stage)) for stage in stages] for kind in "FIW"}
        message = costs.p2p + costs.transfer
        self.message = [message * (a != b) for a, b in itertools.pairwise(self.owner)]  # from each stage to the next
        self.work = [sum(self.time[kind][s] for kind in "FIW" for s in own) * self.m for own in self.stages]

    def run(self, knobs: Knobs, stop: float) -> Schedule | None:
        """Return a schedule, or None if its step would take at least `stop`, or needs more memory."""
        pp, count = self.empty.pp, self.empty.num_stages
        self.knobs, self.free, self.left = knobs, [0.0] * pp, self.work.copy()
        self.held, self.ahead = [0.0] * pp, [0] * pp  # activations, and forwards without I
        self.limit = [max(self.memory - knobs.slope * rank, self.empty.chunks) for rank in range(pp)]
        self.done = {kind: [0] * count for kind in "FIW"}
        self.ends: dict[str, list[list[float]]] = {kind: [[] for _ in range(count)] for kind in "FIW"}
        programs: list[list[Action]] = [[] for _ in range(pp)]
        queue: list[tuple[float, int, int, str, int]] = []  # start, rank, version of the choice, and the action
        versions = [0] * pp
        changed: Iterable[int] = range(pp)
        for _ in range(3 * count * self.m):
            for rank in changed:
                versions[rank] += 1
                if choice := self.choose(rank):
                    heapq.heappush(queue, (choice[3], rank, versions[rank], choice[5], choice[6]))
            while queue and queue[0][2] != versions[queue[0][1]]:
                heapq.heappop(queue)
            if not queue:
                return None  # all ranks wait for memory
            start, rank, _, kind, stage = heapq.heappop(queue)
            programs[rank].append(Action(kind, stage, self.done[kind][stage]))
            self.start(kind, stage, rank, start)
            if self.free[rank] + self.left[rank] >= stop:
                return None
            changed = {rank, *(self.owner[s] for s in (stage - 1, stage + 1) if 0 <= s <= self.last)}
        return Schedule(programs, self.m, self.empty.chunks, self.empty.placement)

    def start(self, kind: str, stage: int, rank: int, start: float) -> None:
        time = self.time[kind][stage]
        self.free[rank] = start + time
        self.left[rank] -= time
        self.ends[kind][stage].append(start + time)
        self.done[kind][stage] += 1
        self.held[rank] += self.change[kind]
        self.ahead[rank] += (kind == "F") - (kind == "I")

    def choose(self, rank: int) -> tuple[float, bool, bool, float, int, str, int] | None:
        """Return a rank's next action: the numbers that decide, of which the fourth is its start; kind and stage."""
        free, found = self.free[rank], []
        for order, stage in enumerate(self.stages[rank]):
            f, i, w = (self.done[kind][stage] for kind in "FIW")
            # Each later stage is left room for a micro-batch, without which this one could not finish.
            room = self.held[rank] + order + 1 <= self.memory and self.ahead[rank] + order + 1 <= self.limit[rank]
            if f < self.m and room and (stage == 0 or f < self.done["F"][stage - 1]):
                start = max(free, self.ends["F"][stage - 1][f] + self.message[stage - 1]) if stage else free
                found.append((start, False, not self.knobs.forward_first, start, order, "F", stage))
            if i < f and (stage == self.last or i < self.done["I"][stage + 1]):
                start = max(free, self.ends["I"][stage + 1][i] + self.message[stage]) if stage < self.last else free
                found.append((start, False, self.knobs.forward_first, start, order, "I", stage))
            if w < i:
                late = free + (1 - self.knobs.patience) * self.time["W"][stage]
                found.append((late, True, False, free, order, "W", stage))
        return min(found, default=None)


def fits(schedule: Schedule, memory: float, deferred: float) -> bool:
    unit = 10**6  # `peak_activations` counts integers
    sizes = dict.fromkeys(range(schedule.num_stages), unit)
    kept = dict.fromkeys(sizes, round(unit * deferred))
    peak = max(peak_activations(program, sizes, kept) for program in schedule.programs)
    return peak <= memory * schedule.chunks * unit


def hand_made(pp: int, microbatches: int, shape: Shape) -> dict[str, Schedule]:
    """Build all hand-made schedules for this number and placement of stages, by name."""
    chunks, placement = shape
    names = (name for name, r in SCHEDULES.items() if r.placement == placement and (r.any_chunks or r.chunks == chunks))
    return {name: build(name, pp, microbatches, chunks) for name in names}


def step_time(timeline: Timeline) -> float:
    return timeline.step_time


def fastest_schedule(
    pp: int,
    microbatches: int,
    memory: float,
    costs: Costs,
    shape: Shape = (1, "loop"),
    deferred: float = 1.0,
    objective: Callable[[Timeline], float] = step_time,
) -> Found:
    """Return the fastest schedule for stages of one shape.

    Args:
        memory: the most activations of a rank, in units of one micro-batch in all stages of the rank.
        costs: the times of the actions in each stage.
        deferred: fraction of a stage's activations that is kept between I and W.
        objective: what to minimise, by default the step time.

    Raises:
        UserError: the limit of memory is less than one micro-batch.
    """
    if memory < 1:
        raise UserError(f"a memory limit of {memory:g} micro-batches is too low: a pp rank holds at least one")
    found: Found | None = None
    for name, schedule in hand_made(pp, microbatches, shape).items():
        if fits(schedule, memory, deferred):
            candidate = Found(objective(simulate(schedule, costs)), name, schedule, costs)
            found = min(filter(None, (found, candidate)), key=lambda each: each.score)
    greedy = Greedy(Schedule([[]] * pp, microbatches, *shape), memory * shape[0], costs, deferred)
    for knobs in KNOBS:
        best = math.inf if found is None else found.score
        new = greedy.run(knobs, stop=best if objective is step_time else math.inf)
        if new is not None and (score := objective(simulate(new, costs))) < best:
            found = Found(score, "search", new, costs)
    assert found is not None, "room for a micro-batch on each rank is enough"
    return found


def shapes(chunks: int | None) -> list[Shape]:
    """Return the shapes that a search tries if it may choose the number of chunks (None) or the placement."""
    return [shape for shape in SHAPES if shape[0] == chunks] or [(chunks, "loop")] if chunks else SHAPES


def fastest_shape(
    pp: int,
    microbatches: int,
    memory: float,
    candidates: Iterable[Shape],
    costs_of: Callable[[Shape], Costs],
    deferred: float = 1.0,
) -> Found:
    """Return the fastest schedule for stages of any of some shapes, see `fastest_schedule`."""
    found = [fastest_schedule(pp, microbatches, memory, costs_of(shape), shape, deferred) for shape in candidates]
    return min(found, key=lambda each: each.score)
