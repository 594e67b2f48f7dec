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
from collections.abc import Callable, Iterable, Mapping
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
    """The greedy scheduler. Its state is in lists of numbers, so that a search takes about a second.

    Args:
        empty: a schedule whose programs are to be found.
        memory: the most activations of a rank, see `peak_activations`.
        costs: times of actions and messages; the time of a pair or a full backward is not used.
        deferred: fraction of a stage's activations that is kept between I and W.
    """

    def __init__(self, empty: Schedule, memory: float, costs: Costs, deferred: float) -> None:
        self.empty, self.last, self.m = empty, empty.num_stages - 1, empty.microbatches
        self.memory = memory + 1e-6  # sums of fractions are rounded
        self.change = {"F": 1.0, "I": deferred - 1, "W": -deferred}  # of a rank's activations
        stages = range(empty.num_stages)
        self.owner = [empty.rank_of(stage) for stage in stages]
        self.stages = [list(enumerate(empty.stages_of(rank)[::-1], start=1)) for rank in range(empty.pp)]
        self.time = {kind: [costs.of(Action(kind, stage)) for stage in stages] for kind in "FIW"}
        message = costs.p2p + costs.transfer
        self.message = [message * (a != b) for a, b in itertools.pairwise(self.owner)]  # from each stage to the next
        self.work = [sum(self.time[kind][s] for kind in "FIW" for _, s in own) * self.m for own in self.stages]

    def run(self, knobs: Knobs, stop: float) -> Schedule | None:
        """Return a schedule, or None if its step would take at least `stop`, or needs more memory."""
        pp, count = self.empty.pp, self.empty.num_stages
        self.knobs, self.free, left = knobs, [0.0] * pp, self.work.copy()
        self.held, self.ahead = [0.0] * pp, [0] * pp  # activations, and forwards without I
        self.limit = [max(self.memory - knobs.slope * rank, self.empty.chunks) for rank in range(pp)]
        self.ends: dict[str, list[list[float]]] = {kind: [[] for _ in range(count)] for kind in "FIW"}
        programs: list[list[Action]] = [[] for _ in range(pp)]
        queue: list[tuple[float, int, int, str, int]] = []  # start, rank, version of the choice, and the action
        versions = [0] * pp
        changed: Iterable[int] = range(pp)
        for _ in range(3 * count * self.m):
            for rank in changed:
                versions[rank] += 1
                if choice := self.choose(rank):
                    heapq.heappush(queue, (choice[3], rank, versions[rank], choice[4], choice[5]))
            while queue and queue[0][2] != versions[queue[0][1]]:
                heapq.heappop(queue)
            if not queue:
                return None  # all ranks wait for memory
            start, rank, _, kind, stage = heapq.heappop(queue)
            programs[rank].append(Action(kind, stage, len(self.ends[kind][stage])))
            time = self.time[kind][stage]
            self.free[rank] = start + time
            left[rank] -= time
            if self.free[rank] + left[rank] >= stop:
                return None
            self.ends[kind][stage].append(start + time)
            self.held[rank] += self.change[kind]
            self.ahead[rank] += (kind == "F") - (kind == "I")
            target = stage + {"F": 1, "I": -1, "W": 0}[kind]
            changed = {rank, self.owner[min(max(target, 0), self.last)]}
        return Schedule(programs, self.m, self.empty.chunks, self.empty.placement)

    def choose(self, rank: int) -> tuple[float, bool, bool, float, str, int] | None:
        """Return a rank's next action: the numbers that decide, of which the fourth is its start; kind and stage."""
        free, best, forward_first = self.free[rank], None, self.knobs.forward_first
        forwards, backwards, weights = self.ends["F"], self.ends["I"], self.ends["W"]
        for order, stage in self.stages[rank]:
            f, i = len(forwards[stage]), len(backwards[stage])
            # Each later stage is left room for a micro-batch, without which this one could not finish.
            if f < self.m and self.held[rank] + order <= self.memory and self.ahead[rank] + order <= self.limit[rank]:
                ready = 0.0
                if stage > 0:
                    inputs = forwards[stage - 1]
                    ready = inputs[f] + self.message[stage - 1] if f < len(inputs) else math.inf
                start = max(free, ready)
                if start < math.inf and (best is None or (start, False, not forward_first) < best[:3]):
                    best = (start, False, not forward_first, start, "F", stage)
            if i < f:
                ready = 0.0
                if stage < self.last:
                    inputs = backwards[stage + 1]
                    ready = inputs[i] + self.message[stage] if i < len(inputs) else math.inf
                start = max(free, ready)
                if start < math.inf and (best is None or (start, False, forward_first) < best[:3]):
                    best = (start, False, forward_first, start, "I", stage)
            if len(weights[stage]) < i:
                late = free + (1 - self.knobs.patience) * self.time["W"][stage]
                if best is None or (late, True, False) < best[:3]:
                    best = (late, True, False, free, "W", stage)
        return best


def fits(schedule: Schedule, memory: float, deferred: float) -> bool:
    """Return whether no rank ever holds more than `memory` micro-batches, see `fastest_schedule`."""
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
    options: Mapping[Shape, Costs],
    deferred: float = 1.0,
    objective: Callable[[Timeline], float] = step_time,
) -> Found:
    """Return the fastest schedule for stages of any of some shapes.

    Args:
        memory: the most activations of a rank, in units of one micro-batch in all stages of the rank.
        options: the times of the actions in each stage, by shape.
        deferred: fraction of a stage's activations that is kept between I and W.
        objective: what to minimise, by default the step time.

    Raises:
        UserError: the limit of memory is less than one micro-batch.
    """
    if memory < 1:
        raise UserError(f"a memory limit of {memory:g} micro-batches is too low: a pp rank holds at least one")
    best = math.inf
    for shape, costs in options.items():
        for name, schedule in hand_made(pp, microbatches, shape).items():
            if fits(schedule, memory, deferred) and (score := objective(simulate(schedule, costs))) < best:
                best, found = score, Found(score, name, schedule, costs)
    for shape, costs in options.items():
        greedy = Greedy(Schedule([[]] * pp, microbatches, *shape), memory * shape[0], costs, deferred)
        for knobs in KNOBS:
            new = greedy.run(knobs, stop=best if objective is step_time else math.inf)
            if new is not None and (score := objective(simulate(new, costs))) < best:
                best, found = score, Found(score, "search", new, costs)
    assert best < math.inf, "room for a micro-batch on each rank is enough"
    return found


def shapes(chunks: int | None) -> list[Shape]:
    """Return the shapes that a search tries if it may choose the number of chunks (None) or the placement."""
    return [shape for shape in SHAPES if shape[0] == chunks] or [(chunks, "loop")] if chunks else SHAPES
