"""Check of puzzle 14: all seven schedules, simulated."""

from types import ModuleType

from docs.programs.svg import LINE, WIDTH, Svg
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, peak_activations, simulate
from puzzles.group import Group
from puzzles.report import Report

CASES = [  # p, m, p2p, memory in micro-batches: four schedules win twice each
    (4, 8, 0.0, 4),
    (4, 8, 0.1, 8),
    (4, 8, 1.0, 4),
    (4, 8, 1.0, 8),
    (4, 12, 2.0, 6),
    (4, 16, 2.0, 16),
    (8, 8, 2.0, 8),
    (3, 8, 2.0, 8),
]


def times(p: int, m: int, p2p: float) -> dict[str, tuple[float, float]]:
    """Return the step time and the peak of activations, in micro-batches, of each schedule."""
    found = {}
    for name in SCHEDULES:
        schedule = build(name, p, m)
        peak = max(map(peak_activations, schedule.programs)) / schedule.chunks
        weights = [1 / schedule.chunks] * schedule.num_stages
        found[name] = simulate(schedule, Costs(p2p=p2p, weights=weights)).step_time, peak
    return found


def check(learner: ModuleType, group: Group, report: Report) -> None:
    for p, m, p2p, memory in CASES:
        where = f"fastest({p}, {m}, {p2p}, {memory})"
        report.begin(where)
        found, name = times(p, m, p2p), learner.fastest(p, m, p2p, memory)
        group.require(name in SCHEDULES, f"{where} is {name!r}, expected one of {', '.join(SCHEDULES)}")
        report.picture = draw(found, name, where, memory)
        time, peak = found[name]
        group.require(peak <= memory, f"{where} is {name}, which holds {peak:g} micro-batches")
        best = min((time, other) for other, (time, peak) in found.items() if peak <= memory)
        sentence = f"{where} is {name}, whose step takes {time:.4g}, but {best[1]} takes {best[0]:.4g}"
        group.require(time <= best[0] * (1 + 1e-9), sentence)


def draw(found: dict[str, tuple[float, float]], choice: str, where: str, memory: float) -> str:
    """Draw a bar for each schedule: its step time, in grey if it does not fit."""
    picture, left = Svg(WIDTH, (len(found) + 2) * (LINE + 6)), 180
    scale = (WIDTH - left - 330) / max(time for time, _ in found.values())
    picture.text(0, 16, f"Step time, {where}", "title")
    for i, (name, (time, peak)) in enumerate(found.items(), start=1):
        y = i * (LINE + 6)
        picture.text(0, y + 17, name + (" (yours)" if name == choice else ""))
        picture.box(left, y, time * scale, LINE, "#56b4e9" if peak <= memory else "#bbbbbb")
        fits = "" if peak <= memory else ": too many"
        picture.text(left + time * scale + 10, y + 17, f"{time:.4g}, holds {peak:g} micro-batches{fits}")
    return str(picture)
