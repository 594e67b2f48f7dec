"""The search against all programs of two ranks and two micro-batches: its step times, and its bounds."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from workbench.schedules.actions import Action, Schedule
from workbench.schedules.improve import numbered
from workbench.schedules.order import Deadlock
from workbench.schedules.search import fastest_schedule
from workbench.schedules.simulate import Costs, activations, simulate


@pytest.mark.parametrize("seed", range(4))
def test_no_program_is_faster_than_the_search(seed: int) -> None:
    """Unequal stages, slow messages, little memory, cheap full backwards, and I that keep more for W."""
    draw = random.Random(seed)
    weights, W = [draw.choice([0.5, 1.0, 1.5, 2.0]) for _ in range(2)], draw.choice([0.5, 1.0])
    costs = Costs(B=(1 + W) * draw.choice([1.0, 0.9]), W=W, p2p=draw.choice([0.0, 0.1, 0.3, 1.0]), weights=weights)
    memory, deferred = draw.choice([1, 1.5, 2, 6]), draw.choice([0.5, 1.0, 3.0])
    both = itertools.product(*(programs_of(rank, memory, deferred) for rank in range(2)))
    least = min(step_time(Schedule(list(programs), 2), costs) for programs in both)
    found = fastest_schedule(2, 2, memory, {(1, "loop"): costs}, deferred)
    assert found.score == pytest.approx(least)
    assert found.bound <= least * (1 + 1e-9)


def programs_of(rank: int, memory: float, deferred: float) -> Iterator[list[Action]]:
    """Yield all programs of a rank with one stage and two micro-batches that fit into memory."""
    for kinds in ("FFIIWW", "FFBIW", "FFBB"):
        for order in sorted(set(itertools.permutations(kinds))):
            done = dict.fromkeys("FBIW", 0)
            for kind in order:
                done[kind] += 1
                if done["W"] > done["I"] or done["B"] + done["I"] > done["F"]:
                    break
            else:
                program = numbered([(kind, rank) for kind in order])
                if max(during for during, _ in activations(program, {rank: 1.0}, {rank: deferred})) <= memory:
                    yield program


def step_time(schedule: Schedule, costs: Costs) -> float:
    try:
        return simulate(schedule, costs).step_time
    except Deadlock:
        return math.inf
