"""Search for a schedule: the fastest program for given times of actions and a limit of memory. No torch.

A greedy scheduler simulates a step: whenever a rank is free, it starts the action that can start first. Three knobs
decide between actions, as in the heuristic of Qi et al. 2023 (arXiv:2401.10241, section 3.1): which of F and I comes
first, how far ranks may run ahead with forwards, and how long a W may delay another action. The search tries several
settings of the knobs and all hand-made schedules, improves the fastest schedules that fit into memory (`improve`), and
returns the best one, with a bound of how much faster any schedule could be. All ranks find the same schedule.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from picotron.console import UserError
from workbench.schedules.actions import Action, Placement, Schedule
from workbench.schedules.improve import BUDGET, ROUNDING, Improver, Part, changes, joins, numbered
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.simulate import Costs, Timeline, activations, simulate

Shape = tuple[int, Placement]  # chunks per rank, and placement of the stages
SHAPES: list[Shape] = [(1, "loop"), (2, "loop"), (2, "V")]
STARTS, RUNS = 2, 4  # schedules that are improved, and runs of the improvement, the later ones of the best one so far


class Found(NamedTuple):
    """A schedule that was found, where it comes from (a name of `hand_made`, or "search"), how its step was timed, and
    the `lower_bound` of all schedules that were possible.
    """

    score: float  # the step time, or another objective
    name: str
    schedule: Schedule
    costs: Costs
    bound: float = 0.0

    @property
    def quality(self) -> str:
        """How far the step time is from the bound, in words."""
        step_time = simulate(self.schedule, self.costs).step_time
        percent = math.ceil(100 * (step_time / self.bound - 1) - 1e-6) if self.bound else 0
        return f"at most {percent} % above the best possible" if percent else "the best possible"


class Knobs(NamedTuple):
    forward_first: bool  # whether F runs before I if both can start
    slope: float  # number of forwards by which a rank may be less far ahead than the previous rank
    patience: float  # a W may delay the next action by this fraction of its time


# Settings that often win come first, because a run stops when its schedule cannot be faster than the best so far.
KNOBS = [
    Knobs(forward_first, slope, patience)
    for slope in (0.0, 0.5, 1.0, 1.5, 2.0)
    for forward_first in (False, True)
    for patience in (1.0, 0.5, 0.0)
]


class Greedy:
    """The greedy scheduler. Its state is in lists of numbers, so that a search takes about a second.

    Args:
        empty: a schedule whose programs are to be found.
        memory, deferred, sizes: see `fastest_schedule`.
        costs: times of actions and messages; the time of a pair is not used.
        backwards: "split" into I and W, "full", or "mixed": full where an I that keeps more than it frees does not fit.
    """

    def __init__(
        self,
        empty: Schedule,
        memory: float,
        costs: Costs,
        deferred: float,
        sizes: Sequence[float] | None,
        backwards: str,
    ) -> None:
        self.empty, self.last, self.m = empty, empty.num_stages - 1, empty.micro_batches
        self.memory = memory * (1 + ROUNDING)
        self.sizes = stage_sizes(empty, sizes)
        stages = range(empty.num_stages)
        self.backwards = backwards
        self.change = changes(deferred, self.sizes)
        self.owner = [empty.rank_of(stage) for stage in stages]
        own = [empty.stages_of(rank)[::-1] for rank in range(empty.pp)]
        self.stages = [list(enumerate(each, start=1)) for each in own]  # of each rank, the last one first
        # What an I adds, if it keeps more for its W than it frees, and no full backward can take its place.
        self.extra = [max(0.0, *(self.change["I", stage] for stage in each)) * (backwards == "split") for each in own]
        self.time = {kind: [costs.of(Action(kind, stage)) for stage in stages] for kind in "FBIW"}
        message = costs.p2p + costs.transfer
        self.message = [message * (a != b) for a, b in itertools.pairwise(self.owner)]  # from each stage to the next
        full_times, split_times = self.time["B"], list(map(operator.add, self.time["I"], self.time["W"]))
        times = {"split": split_times, "full": full_times, "mixed": list(map(min, full_times, split_times))}
        self.least = times[backwards]  # of a whole backward, by stage
        self.work = [self.m * sum(self.time["F"][stage] + self.least[stage] for stage in each) for each in own]
        full = [sum(self.sizes[stage] for stage in each) for each in own]  # of one micro-batch
        # in whole forwards, so that a fraction of one more, which holds nothing, changes nothing
        self.room = [math.floor(empty.chunks * self.memory / size) if size else math.inf for size in full]

    def run(self, knobs: Knobs, stop: float) -> Schedule | None:
        """Return a schedule, or None if its step would take at least `stop`, or if memory is too short."""
        pp, count = self.empty.pp, self.empty.num_stages
        self.knobs, self.free, left = knobs, [0.0] * pp, self.work.copy()
        self.held, self.ahead = [0.0] * pp, [0] * pp  # activations, and forwards without I
        self.limit = [max(room - knobs.slope * rank, self.empty.chunks) for rank, room in enumerate(self.room)]
        self.ends: dict[str, list[list[float]]] = {kind: [[] for _ in range(count)] for kind in "FIW"}
        programs: list[list[Part]] = [[] for _ in range(pp)]
        choices: list[Part] = [("", 0)] * pp  # each rank's next action, and when it can start
        starts = [math.inf] * pp
        changed: Iterable[int] = range(pp)
        finished = 0  # backwards
        while finished < count * self.m:
            for rank in changed:
                starts[rank], choices[rank] = self.choose(rank)
            rank = starts.index(start := min(starts))
            if start == math.inf:
                return None
            programs[rank].append(choices[rank])
            kind, stage = choices[rank]
            end = self.free[rank] = start + self.time[kind][stage]
            # An I and its W may take longer than a full backward, with which the work is counted.
            left[rank] -= self.least[stage] - self.time["W"][stage] if kind == "I" else end - start
            if self.free[rank] + left[rank] >= stop:
                return None
            for half in "IW" if kind == "B" else kind:
                self.ends[half][stage].append(end)
            finished += kind in "BW"
            self.held[rank] += self.change[kind, stage]
            direction = {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
            self.ahead[rank] += direction
            changed = {rank, self.owner[min(max(stage + direction, 0), self.last)]}
        return Schedule([numbered(program) for program in programs], self.m, self.empty.chunks, self.empty.placement)

    def choose(self, rank: int) -> tuple[float, Part]:
        """Return the start of a rank's next action, infinity if the rank waits, and the action."""
        free, held, ahead = self.free[rank], self.held[rank], self.ahead[rank]
        forwards, backwards, weights = self.ends["F"], self.ends["I"], self.ends["W"]
        place_of_f, place_of_i = (0, 1) if self.knobs.forward_first else (1, 0)
        best: tuple[float, int, int, str] = (math.inf, 0, 0, "")  # its start, and what decides between equal starts
        # The oldest micro-batch that has not finished on this rank is left room to finish, so that the next ones can.
        oldest = len(backwards[self.stages[rank][-1][1]])
        needs = held + self.extra[rank]
        needs += sum(self.sizes[stage] for _, stage in self.stages[rank] if len(forwards[stage]) <= oldest)
        for order, stage in self.stages[rank]:
            f, i = len(forwards[stage]), len(backwards[stage])
            if f < self.m and needs + (f > oldest) * self.sizes[stage] <= self.memory:
                start = free if ahead + order <= self.limit[rank] else math.inf
                if stage > 0:
                    inputs = forwards[stage - 1]
                    start = max(start, inputs[f] + self.message[stage - 1]) if f < len(inputs) else math.inf
                if start <= best[0]:
                    best = min(best, (start, place_of_f, order, "F"))
            split_fits = self.backwards != "full" and held + self.change["I", stage] <= self.memory
            if i < f and (split_fits or self.backwards != "split"):
                start = free
                if stage < self.last:
                    inputs = backwards[stage + 1]
                    start = max(free, inputs[i] + self.message[stage]) if i < len(inputs) else math.inf
                if start <= best[0]:
                    best = min(best, (start, place_of_i, order, "I" if split_fits else "B"))
            if len(weights[stage]) < i:
                # A W starts when the rank is free, but it is chosen as if it started later.
                best = min(best, (free + (1 - self.knobs.patience) * self.time["W"][stage], 2, order, "W"))
        start, _, order, kind = best
        return free if kind == "W" else start, (kind, self.stages[rank][order - 1][1])


def stage_sizes(schedule: Schedule, sizes: Sequence[float] | None) -> Sequence[float]:
    """Return the size of a micro-batch in each stage; by default, a micro-batch in all stages of a rank is 1."""
    return [1 / schedule.chunks] * schedule.num_stages if sizes is None else sizes


def fits(schedule: Schedule, memory: float, deferred: float, sizes: Sequence[float] | None = None) -> bool:
    """Return whether no rank ever holds more than `memory`, see `fastest_schedule`."""
    units = dict(enumerate(stage_sizes(schedule, sizes)))
    kept = {stage: size * deferred for stage, size in units.items()}
    peak = max(during for program in schedule.programs for during, _ in activations(program, units, kept))
    return bool(peak <= memory * (1 + ROUNDING))


def hand_made(pp: int, micro_batches: int, shape: Shape) -> dict[str, Schedule]:
    """Build all hand-made schedules for this number and placement of stages, by name. Schedules with groups also come
    with groups of m, m / 2, m / 3 and m / 4 micro-batches: the default size suits equal times and free messages.
    """
    (chunks, placement), found = shape, dict[str, Schedule]()
    sizes = dict.fromkeys(size for parts in (1, 2, 3, 4) if (size := -(-micro_batches // parts)) >= pp)
    for name, recipe in SCHEDULES.items():
        if recipe.placement == placement and (recipe.any_chunks or recipe.chunks == chunks):
            found[name] = build(name, pp, micro_batches, chunks)
            for size in sizes if recipe.has_groups and chunks > 1 else ():
                schedule = build(name, pp, micro_batches, chunks, size)
                if schedule not in found.values():
                    found[f"{name} in groups of {size}"] = schedule
    return found


def step_time(timeline: Timeline) -> float:
    return timeline.step_time


def fastest_schedule(
    pp: int,
    micro_batches: int,
    memory: float,
    options: Mapping[Shape, Costs],
    deferred: float = 1.0,
    objective: Callable[[Timeline], float] = step_time,
    sizes: Sequence[float] | None = None,
) -> Found:
    """Return the fastest schedule for stages of any of some shapes.

    Args:
        memory: the most activations of a rank, in the unit of `sizes`.
        options: the times of the actions in each stage, by shape.
        deferred: fraction of a stage's activations that is kept between I and W. It is above 1 if a forward keeps
            little, because I computes the rest again; then a low limit needs full backwards.
        objective: what to minimise, by default the step time. Only for it, the best schedules are improved.
        sizes: the activations of a micro-batch in each stage, in any unit, such as bytes; then all shapes have this
            number of stages. By default, the unit is one micro-batch in all stages of a rank.

    Raises:
        UserError: the limit of memory is less than one micro-batch needs.
    """
    empty = {shape: Schedule([[]] * pp, micro_batches, *shape) for shape in options}
    roomy = [shape for shape in options if memory * (1 + ROUNDING) >= largest_rank(empty[shape], sizes)]
    if not roomy:
        if sizes is None:
            raise UserError(f"a memory limit of {memory:g} micro-batches is too low: a pp rank holds at least one")
        least = min(largest_rank(each, sizes) for each in empty.values())
        raise UserError(f"a memory limit of {memory:g} is too low: one micro-batch takes {least:g} on a pp rank")
    bound = min(lower_bound(empty[shape], memory, options[shape], deferred, sizes) for shape in roomy)
    best, found = math.inf, list[Found]()  # each one better than the one before it
    for shape in roomy:
        costs = options[shape]
        for name, schedule in hand_made(pp, micro_batches, shape).items():
            if fits(schedule, memory, deferred, sizes) and (score := objective(simulate(schedule, costs))) < best:
                best = score
                found.append(Found(score, name, schedule, costs, bound))
    # A program for equal stages of the largest size also fits, and is sometimes faster.
    each_sizes = [sizes] if sizes is None else [sizes, [max(sizes)] * len(sizes)]
    for shape, each, backwards in itertools.product(roomy, each_sizes, ("split", "full", "mixed")):
        costs = options[shape]
        if backwards != "split" and not joins(empty[shape], costs, deferred):
            continue
        greedy = Greedy(empty[shape], memory, costs, deferred, each, backwards)
        for knobs in KNOBS:
            new = greedy.run(knobs, stop=best * (1 - ROUNDING) if objective is step_time else math.inf)
            if new is not None and (score := objective(simulate(new, costs))) < best:
                best = score
                found.append(Found(score, "search", new, costs, bound))
    assert found, "room for a micro-batch on each rank is enough"
    if objective is not step_time:
        return found[-1]
    starts = found[-STARTS:]
    for seed in range(RUNS):
        _, _, old, costs, _ = starts.pop() if starts else min(found, key=lambda each: each.score)
        improver = Improver(old, memory, costs, deferred, stage_sizes(old, sizes))
        if (new := improver.run(old, bound, BUDGET // RUNS, seed)) is not old:
            found.append(Found(simulate(new, costs).step_time, "search", new, costs, bound))
    return min(found, key=lambda each: each.score)


def lower_bound(
    empty: Schedule, memory: float, costs: Costs, deferred: float = 1.0, sizes: Sequence[float] | None = None
) -> float:
    """Return a time that no step of a shape can fall below. It is the longest of

    - the way of one micro-batch through all stages and back;
    - for each rank, the earliest arrival of a forward, and the rank's work;
    - the same without W, and the way of the last gradient from the rank to the first stage;
    - the earliest arrival, and the product of memory and time that a rank's micro-batches need, divided by its memory.

    Args:
        empty: a schedule of that shape, whose programs are not used.
        memory, costs, deferred, sizes: see `fastest_schedule`.
    """
    stages, m, sizes = range(empty.num_stages), empty.micro_batches, stage_sizes(empty, sizes)
    pairs = [(t, sum(costs.of(Action(*part)) for part in key)) for key, t in costs.measured.items() if len(key) == 2]
    # An overlapped action takes at least this fraction of its time.
    shortest = min([1.0, costs.overlapped, *(together / alone for together, alone in pairs if alone)])
    f, b, i, w = ([shortest * costs.of(Action(kind, stage)) for stage in stages] for kind in "FBIW")
    half = list(map(min, b, i))
    whole = [min(b[s], i[s] + w[s]) for s in stages]
    message = [(costs.p2p + costs.transfer) * (empty.rank_of(s) != empty.rank_of(s + 1)) for s in stages[:-1]]
    arrival = [0.0, *itertools.accumulate(f[s] + message[s] for s in stages[:-1])]  # of the first forward
    ways = (message[s] + (half[s] if s else whole[s]) for s in stages[:-1])
    rest = [0.0, *itertools.accumulate(ways)]  # from the end of a backward to the end of the step
    back = [rest[s] + (half[s] if s else whole[s]) for s in stages]
    path = arrival[-1] + f[-1] + back[-1]
    # From the start of a forward to the start of its backward.
    stay = [path - arrival[s] - back[s] for s in stages]
    bounds = [path]
    for own in map(empty.stages_of, range(empty.pp)):
        unit, usable = sizes[own[0]], memory
        if deferred == 1 and unit and all(sizes[s] == unit for s in own):  # whole units are held
            usable = unit * math.floor(memory * (1 + ROUNDING) / unit)
        held = sum(sizes[s] * (stay[s] + min(b[s], i[s] + deferred * w[s])) for s in own)
        needs = [
            m * sum(f[s] + whole[s] for s in own),
            m * sum(f[s] + half[s] for s in own) + min(rest[s] for s in own),
            m * held / usable if usable else 0.0,
        ]
        bounds.append(arrival[own[0]] + max(needs))
    return max(bounds)


def largest_rank(schedule: Schedule, sizes: Sequence[float] | None) -> float:
    """Return the largest size of a micro-batch in all stages of a rank."""
    sizes = stage_sizes(schedule, sizes)
    return max(sum(sizes[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.pp))


def shapes(chunks: int | None) -> list[Shape]:
    """Return the shapes that a search tries if it may choose the number of chunks (None) or the placement."""
    return [shape for shape in SHAPES if shape[0] == chunks] or [(chunks, "loop")] if chunks else SHAPES
