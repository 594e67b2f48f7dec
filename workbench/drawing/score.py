"""Ranking of pipeline schedules under fixed settings: limits of memory, times of actions and of messages.

A program is ranked among the hand-made schedules of `schedules.SCHEDULES` and the result of the search. Stages are
equal, and a rank has at most two of them. Times are in forwards of one micro-batch through all stages of a rank,
activations in micro-batches on a rank. Messages do not block the ranks, as in the executor.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from picotron.console import UserError
from workbench.console import text_table
from workbench.schedules.actions import Schedule
from workbench.schedules.search import SHAPES, fastest_schedule, fits, hand_made, lower_bound
from workbench.schedules.simulate import Costs, peak_activations, simulate

SIZES = {4: (4, 8, 16), 8: (8, 16, 32), 16: (16, 32)}  # micro-batches, by pp
MEMORY = {"p": 1, "p/2": 2, "p/3": 3}  # limits, as parts of the p micro-batches on the first rank of 1F1B
MESSAGES = (0.0, 0.1)  # latencies
MAX_CHUNKS = max(chunks for chunks, _ in SHAPES)
TIMES = {
    "equal": Costs(),
    # Qi et al. 2023 (arXiv:2401.10241) measured 29.7, 29.4 and 19.9 ms for F, I and W of a model of 6.2B parameters.
    "measured": Costs(B=1.66, I=0.99, W=0.67),
}


class Setting(NamedTuple):
    """Conditions for a step. `memory` is a key of MEMORY, `times` one of TIMES."""

    pp: int
    micro_batches: int
    memory: str
    message: float
    times: str

    def __str__(self) -> str:
        limit = f"memory {self.memory} = {self.limit:.4g} micro-batches"
        return (
            f"pp={self.pp}, micro_batches={self.micro_batches}, {limit}, message {self.message:g}, {self.times} times"
        )

    @property
    def limit(self) -> float:
        """The most activations of a rank, in micro-batches."""
        return self.pp / MEMORY[self.memory]

    def costs(self, chunks: int) -> Costs:
        """Return costs with which a rank takes the same time for a micro-batch, whatever the number of its stages."""
        weights = [1 / chunks] * (self.pp * chunks)
        return dataclasses.replace(TIMES[self.times], p2p=self.message, weights=weights)

    def admits(self, schedule: Schedule) -> bool:
        """Return whether a schedule has this setting's numbers, few stages, and fits into the memory."""
        numbers = (schedule.pp, schedule.micro_batches) == (self.pp, self.micro_batches)
        return numbers and schedule.chunks <= MAX_CHUNKS and fits(schedule, self.limit, deferred=1)


class Score(NamedTuple):
    """The key figures of a schedule. Schedules of equal step times share a place."""

    place: int
    name: str
    step_time: float
    bubble: float
    peak: float


def settings(pp: int, micro_batches: int, chunks: int = 1) -> list[Setting]:
    """Return all settings with these numbers.

    Raises:
        UserError: there is none, or a rank has too many stages.
    """
    if micro_batches not in SIZES.get(pp, ()):
        sizes = "; ".join(f"pp={pp} with {', '.join(map(str, sizes))} micro-batches" for pp, sizes in SIZES.items())
        raise UserError(f"no setting has pp={pp} and micro_batches={micro_batches}; the settings are {sizes}")
    if chunks > MAX_CHUNKS:
        raise UserError(f"the schedule has {chunks} stages per pp rank; the settings allow at most {MAX_CHUNKS}")
    return [Setting(pp, micro_batches, *rest) for rest in itertools.product(MEMORY, MESSAGES, TIMES)]


def published(setting: Setting) -> Iterator[tuple[str, Schedule]]:
    """Yield the hand-made schedules and, if it is another one, the schedule that the search finds, with their names."""
    for shape in SHAPES:
        made = hand_made(setting.pp, setting.micro_batches, shape)
        yield from ((f"{name} (v {shape[0]})", schedule) for name, schedule in made.items())
    options = {shape: setting.costs(shape[0]) for shape in SHAPES}
    found = fastest_schedule(setting.pp, setting.micro_batches, setting.limit, options)
    if found.name == "search":
        yield f"search (v {found.schedule.chunks})", found.schedule


def peak(schedule: Schedule) -> float:
    """Return the most activations that a rank holds, in micro-batches."""
    return max(map(peak_activations, schedule.programs)) / schedule.chunks


def ranking(setting: Setting, schedules: Iterable[tuple[str, Schedule]]) -> list[Score]:
    """Rank the schedules that a setting admits by their step times, then by their activations."""
    scores = []
    for name, schedule in schedules:
        if setting.admits(schedule):
            step = simulate(schedule, setting.costs(schedule.chunks))
            scores.append(Score(0, name, round(step.step_time, 9), step.bubble, peak(schedule)))
    times = sorted(score.step_time for score in scores)
    ranked = (score._replace(place=1 + times.index(score.step_time)) for score in scores)
    return sorted(ranked, key=lambda score: (score.place, score.peak))


def bound(setting: Setting, limit: float | None = None) -> float:
    """Return a lower bound of the step time: no program of at most two stages per rank can be faster.

    Args:
        limit: the most activations of a rank, by default that of the setting.
    """
    empty = [Schedule([[]] * setting.pp, setting.micro_batches, *shape) for shape in SHAPES]
    return min(lower_bound(each, limit or setting.limit, setting.costs(each.chunks)) for each in empty)


def score_tables(own: Mapping[str, Schedule]) -> Iterator[str]:
    """Yield a table for each setting that admits the first one of some schedules. The others are ranked with it.

    Raises:
        UserError: the settings have other numbers, fewer stages or less memory.
    """
    first = next(iter(own.values()))
    possible = settings(first.pp, first.micro_batches, first.chunks)
    admitting = [setting for setting in possible if setting.admits(first)]
    if not admitting:
        raise UserError(
            f"a pp rank holds the activations of up to {peak(first):g} micro-batches; "
            f"the settings with pp={first.pp} allow at most {first.pp}"
        )
    for setting in admitting:
        rows = [
            [str(score.place), score.name, f"{score.step_time:.5g}", f"{score.bubble:.1%}", f"{score.peak:g}"]
            for score in ranking(setting, [*own.items(), *published(setting)])
        ]
        table = text_table([["place", "schedule", "step time", "idle", "activations"], *rows], first_number=2)
        yield f"{setting}; no step can take less than {bound(setting):.5g}\n{table}\n"
