"""Improve a schedule by local search: move single actions within the programs of their ranks. No torch.

A move takes two neighbouring actions of a rank, often on the critical path, and lets the second one run earlier or the
first one later; some moves join an I and its W to a full backward, or split one. Several moves on a rank can be made
together. A program is accepted if it is at most as slow as the one before it, or as the one `HISTORY` moves before
(late acceptance hill climbing, Burke and Bykov 2017, doi:10.1016/j.ejor.2016.07.012), so the search can leave a local
optimum. Its random numbers have fixed seeds, and its effort is counted in simulated actions, not in seconds, so all
ranks find the same program.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from workbench.schedules.actions import Action, Schedule
from workbench.schedules.simulate import Costs, simulate

BUDGET = 1_600_000  # simulated actions of all runs of a search, half a second to one and a half
HISTORY = 300  # moves
MOVES = (1, 1, 1, 2, 2, 3)  # numbers of moves that are made together
ROUNDING = 1e-9  # relative: sums of fractions are rounded

Part = tuple[str, int]  # kind and stage of an action; micro-batches follow, because they run in order
Place = tuple[int, int]  # rank, and position in its program


def changes(deferred: float, sizes: Sequence[float]) -> dict[Part, float]:
    """Return by how much each action changes the activations of its rank."""
    fractions = {"F": 1.0, "B": -1.0, "I": deferred - 1, "W": -deferred}
    return {(kind, stage): part * size for kind, part in fractions.items() for stage, size in enumerate(sizes)}


def joins(empty: Schedule, costs: Costs, deferred: float) -> bool:
    """Return whether a full backward can be better than I and W: it is shorter, or uses less memory."""
    times = ([costs.of(Action(kind, stage)) for kind in "BIW"] for stage in range(empty.num_stages))
    return deferred > 1 or any(b < (i + w) * (1 - ROUNDING) for b, i, w in times)


class Timing(NamedTuple):
    """The step time, the action that ends last, and what each action of each rank waited for, if anything."""

    step_time: float
    last: Place
    causes: list[list[Place | None]]


class Improver:
    """The local search for a shape, a limit of memory and costs, see `search.fastest_schedule`.

    Args:
        empty: a schedule of that shape, whose programs are not used.
        memory, costs, deferred: see `search.fastest_schedule`.
        sizes: the activations of a micro-batch in each stage.
    """

    def __init__(self, empty: Schedule, memory: float, costs: Costs, deferred: float, sizes: Sequence[float]) -> None:
        self.empty, self.costs, self.memory = empty, costs, memory * (1 + ROUNDING)
        stages = range(empty.num_stages)
        actions = {(kind, stage): Action(kind, stage) for kind in "FBIW" for stage in stages}
        self.time = {part: costs.of(action) for part, action in actions.items()}
        self.changes = changes(deferred, sizes)
        # The result that an action needs, the one that another stage needs from it, and the rank of that stage.
        sources = {part: empty.source(action) for part, action in actions.items()}
        targets = {part: empty.target(action) for part, action in actions.items()}
        self.needs = {part: source and (source.kind, source.stage) for part, source in sources.items()}
        self.makes = {
            part: None if targets[part] is None else (action.result.kind, part[1]) for part, action in actions.items()
        }
        self.receiver = {part: None if target is None else empty.rank_of(target) for part, target in targets.items()}
        self.joins = joins(empty, costs, deferred)

    def timing(self, programs: Sequence[list[Part]]) -> Timing | None:
        """Return when the step ends, as `simulate` computes it, or None if the programs deadlock."""
        transfer, p2p = self.costs.transfer, self.costs.p2p
        free = [0.0] * len(programs)
        arrivals: dict[Part, list[tuple[float, Place]]] = {made: [] for made in self.makes.values() if made}
        taken = dict.fromkeys(arrivals, 0)
        links: dict[tuple[int, int | None], float] = {}  # when each link is free
        causes: list[list[Place | None]] = [[] for _ in programs]
        waiting: dict[Part, int] = {}  # the rank that waits for a result
        ready = list(range(len(programs)))
        while ready:
            rank = ready.pop()
            program, now, own = programs[rank], free[rank], causes[rank]
            for position in range(len(own), len(program)):
                part = program[position]
                cause = (rank, position - 1) if position else None
                if need := self.needs[part]:
                    if taken[need] == len(arrivals[need]):
                        waiting[need] = rank
                        break
                    arrival, sender = arrivals[need][taken[need]]
                    taken[need] += 1
                    if arrival > now:
                        now, cause = arrival, sender
                own.append(cause)
                now += self.time[part]
                if made := self.makes[part]:
                    arrival, receiver = now, self.receiver[part]
                    if receiver != rank:
                        if transfer:
                            arrival = links[rank, receiver] = max(now, links.get((rank, receiver), 0.0)) + transfer
                        arrival += p2p
                    arrivals[made].append((arrival, (rank, position)))
                    if made in waiting:
                        ready.append(waiting.pop(made))
            free[rank] = now
        if waiting:
            return None
        last = free.index(max(free))
        return Timing(free[last], (last, len(programs[last]) - 1), causes)

    def valid(self, program: list[Part]) -> bool:
        """Return whether the order of a rank's actions is possible and they fit into memory."""
        done = dict.fromkeys(self.time, 0)
        held = 0.0
        for part in program:
            kind, stage = part
            done[part] += 1
            held += self.changes[part]
            if (
                held > self.memory
                or (kind == "W" and done[part] > done["I", stage])
                or (kind in "BI" and done["B", stage] + done["I", stage] > done["F", stage])
            ):
                return False
        return True

    def place(self, programs: Sequence[list[Part]], timing: Timing, draw: random.Random) -> Place:
        """Return a random action that is not the first of its rank: often on the critical path, after another one."""
        path: list[Place] = []
        place: Place | None = timing.last if draw.random() < 0.5 else None
        while place is not None:
            cause = timing.causes[place[0]][place[1]]
            if cause is not None and cause[0] == place[0]:
                path.append(place)
            place = cause
        rank = draw.randrange(len(programs))
        return draw.choice(path) if path else (rank, draw.randrange(1, len(programs[rank])))

    def moved(self, program: list[Part], second: int, draw: random.Random) -> list[Part]:
        """Return a program after a random move of an action or the one before it; it can be impossible."""
        program = program.copy()
        kind, stage = program[second - 1]
        if self.joins and draw.random() < 0.2:
            if kind == "B":
                program[second - 1 : second] = [("I", stage), ("W", stage)]
            elif kind == "I" and ("W", stage) in program[second:]:
                program[second - 1] = ("B", stage)
                del program[program.index(("W", stage), second)]
            return program
        distance = draw.choice((1, 1, 1, 1, 1, 2, 3, 4, 5, 6))
        if draw.random() < 0.5:
            program.insert(max(0, second - distance), program.pop(second))
        else:
            program.insert(second - 1 + distance, program.pop(second - 1))
        return program

    def run(self, schedule: Schedule, bound: float, budget: int = BUDGET, seed: int = 0) -> Schedule:
        """Improve a schedule until its step takes `bound`, or the budget is spent.

        Args:
            budget: number of simulated actions.
            seed: seed of the random moves.

        Returns:
            The fastest schedule found; the given one if it has overlapped pairs, or if none is faster.
        """
        programs = [[(part.kind, part.stage) for part in own if isinstance(part, Action)] for own in schedule.programs]
        count = sum(map(len, programs))
        timing = self.timing(programs) if count == sum(map(len, schedule.programs)) and count > 3 else None
        if timing is None:
            return schedule
        draw, number = random.Random(seed), 0
        best, fastest = timing.step_time, programs
        history = [best] * HISTORY
        while budget > 0 and best > bound * (1 + ROUNDING):
            number += 1
            rank, second = self.place(programs, timing, draw)
            program = programs[rank]
            for _ in range(draw.choice(MOVES)):
                program = self.moved(program, min(max(1, second), len(program) - 1), draw)
                second += draw.randint(-4, 4)
            budget -= len(program)
            if program == programs[rank] or not self.valid(program):
                continue
            changed = [*programs[:rank], program, *programs[rank + 1 :]]
            budget -= count
            if (new := self.timing(changed)) is None:
                continue
            if new.step_time <= max(history[number % HISTORY], timing.step_time):
                programs, timing = changed, new
                if new.step_time < best * (1 - ROUNDING):
                    best, fastest = new.step_time, changed
            history[number % HISTORY] = timing.step_time
        new_programs = [numbered(program) for program in fastest]
        improved = Schedule(new_programs, schedule.micro_batches, schedule.chunks, schedule.placement)
        return min(schedule, improved, key=lambda each: simulate(each, self.costs).step_time)


def numbered(program: list[Part]) -> list[Action]:
    """Return a program whose stages run their micro-batches in order, with their numbers."""
    done: dict[Part, list[int]] = {}  # the micro-batches of each kind (I and B are one kind) and stage
    actions = []
    for kind, stage in program:
        own = done.setdefault(("F" if kind == "F" else "B", stage), [])
        split = done.setdefault(("I", stage), [])
        micro_batch = split.pop(0) if kind == "W" else len(own)
        if kind != "W":
            own.append(micro_batch)
        if kind == "I":
            split.append(micro_batch)
        actions.append(Action(kind, stage, micro_batch))
    return actions
