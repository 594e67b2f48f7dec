"""The least step time of a small pipeline, by branch and bound: an oracle for the search.

A state is what a rank's future depends on: how many F, I and W each stage has run (a full backward counts as an I and a
W), when each rank is free, and when each result that another stage has not used yet arrives. A state is dropped if a
bound says that it cannot be faster than the best schedule so far, or if an earlier one ran the same actions and was in
nothing later.
"""

import itertools
import math
from typing import NamedTuple

from picotron.schedules.actions import Action, Schedule
from picotron.schedules.search import ROUNDING
from picotron.schedules.simulate import Costs


class TooLargeError(Exception):
    """The search visits more states than allowed."""


class State(NamedTuple):
    counts: tuple[tuple[int, int, int], ...]  # by stage: F, I, W
    free: tuple[float, ...]  # by rank
    forwards: tuple[tuple[float, ...], ...]  # by stage: arrivals of the forwards that wait there
    backwards: tuple[tuple[float, ...], ...]


class Exact:
    """The branch and bound.

    Args:
        empty: a schedule of the shape, whose programs are not used.
        memory, costs, deferred: see `fastest_schedule`.
        best: a step time that is known to be possible.
        limit: number of states that may be visited.
    """

    def __init__(
        self, empty: Schedule, memory: float, costs: Costs, deferred: float, best: float, limit: int = 40_000
    ) -> None:
        self.m, self.count, self.best, self.left = empty.micro_batches, empty.num_stages, best, limit
        self.memory, self.size, self.deferred = memory * (1 + ROUNDING), 1 / empty.chunks, deferred
        self.own = [empty.stages_of(rank) for rank in range(empty.pp)]
        self.owner = [empty.rank_of(stage) for stage in range(self.count)]
        self.time = {kind: [costs.of(Action(kind, s)) for s in range(self.count)] for kind in "FBIW"}
        self.message = [costs.p2p * (a != b) for a, b in itertools.pairwise(self.owner)]
        self.half = [min(i, b) for i, b in zip(self.time["I"], self.time["B"], strict=True)]
        halves = zip(self.time["B"], self.time["I"], self.time["W"], strict=True)
        self.whole = [min(b, i + w) for b, i, w in halves]
        # What follows, at least, from the start of the last backward and from the end of the last F of a stage.
        self.back = [self.whole[0]]
        for s in range(1, self.count):
            self.back.append(self.half[s] + self.message[s - 1] + self.back[s - 1])
        self.after_f = [self.back[-1]]
        for s in reversed(range(self.count - 1)):
            self.after_f.insert(0, self.message[s] + self.time["F"][s + 1] + self.after_f[0])
        self.seen: dict[tuple[tuple[int, int, int], ...], list[tuple[float, ...]]] = {}

    def solve(self) -> float:
        """Return the least step time. Raises TooLargeError."""
        nothing: tuple[tuple[float, ...], ...] = ((),) * self.count
        forwards = ((0.0,) * self.m, *nothing[1:])
        self.visit(State(((0, 0, 0),) * self.count, (0.0,) * len(self.own), forwards, nothing))
        return self.best

    def visit(self, state: State) -> None:
        if not any(m < self.m for *_, m in state.counts):
            self.best = min(self.best, max(state.free))
            return
        self.left -= 1
        if self.left < 0:
            raise TooLargeError
        children = []
        choices, soon = self.choices(state)
        for start, kind, stage in choices:
            if start < soon:
                child = self.after(state, start, kind, stage)
                children.append((self.bound(child), start, child))
        for bound, _, child in sorted(children, key=lambda each: each[:2]):
            if bound < self.best * (1 - ROUNDING) and not self.dominated(child):
                self.visit(child)

    def choices(self, state: State) -> tuple[list[tuple[float, str, int]], float]:
        """Return the start, kind and stage of each action that can be next, and a time before which one of them starts:
        the end of an action that could run in the gap, and that uses no more memory later.
        """
        choices, soon = [], math.inf
        for own, free in zip(self.own, state.free, strict=True):
            held = sum(f - i + self.deferred * (i - w) for f, i, w in (state.counts[s] for s in own)) * self.size
            all_fit = len(own) * self.m * max(1, self.deferred) * self.size <= self.memory
            for s in own:
                f, i, w = state.counts[s]
                forwards, backwards = state.forwards[s], state.backwards[s] if s < self.count - 1 else (0.0,)
                fits = {change: held + change * self.size <= self.memory for change in (1, self.deferred - 1)}
                options = [("W", (0.0,))] if w < i else []
                options += [("F", forwards)] if forwards and fits[1] else []
                if backwards and i < f:
                    options += [("B", backwards)] + [("I", backwards)] * fits[self.deferred - 1]
                for kind, arrivals in options:
                    start = max(free, arrivals[0])
                    choices.append((start, kind, s))
                    if all_fit or kind in "WB" or (kind == "I" and self.deferred <= 1):
                        soon = min(soon, start + self.time[kind][s])
        return choices, soon

    def after(self, state: State, start: float, kind: str, s: int) -> State:
        counts, free = list(state.counts), list(state.free)
        forwards, backwards = list(state.forwards), list(state.backwards)
        f, i, w = counts[s]
        end = free[self.owner[s]] = start + self.time[kind][s]
        counts[s] = (f + (kind == "F"), i + (kind in "IB"), w + (kind in "WB"))
        if kind == "F":
            forwards[s] = forwards[s][1:]
            if s < self.count - 1:
                forwards[s + 1] = (*forwards[s + 1], end + self.message[s])
        elif kind != "W":
            backwards[s] = backwards[s][1:]
            if s > 0:
                backwards[s - 1] = (*backwards[s - 1], end + self.message[s - 1])
        return State(tuple(counts), tuple(free), tuple(forwards), tuple(backwards))

    def bound(self, state: State) -> float:
        """Return a time that no step from this state falls below."""
        bounds = list(state.free)
        for own, free in zip(self.own, state.free, strict=True):
            work = 0.0
            for s in own:
                f, i, w = (self.m - count for count in state.counts[s])
                work += f * self.time["F"][s] + i * self.whole[s] + (w - i) * self.time["W"][s]
                if f:
                    start = max(free, *state.forwards[s][:1], 0.0)
                    bounds.append(start + f * self.time["F"][s] + self.after_f[s])
                if i:
                    start = max(free, *state.backwards[s][:1], 0.0)
                    bounds.append(start + (i - 1) * self.half[s] + self.back[s])
            bounds.append(free + work)
        return max(bounds)

    def dominated(self, state: State) -> bool:
        times = state.free + tuple(t for each in state.forwards + state.backwards for t in each)
        others = self.seen.setdefault(state.counts, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            return True
        others[:] = [other for other in others if not all(a >= b for a, b in zip(other, times, strict=True))]
        others.append(times)
        return False
