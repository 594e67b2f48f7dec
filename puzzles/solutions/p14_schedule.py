"""Solution of puzzle 14."""

from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, memory_curves, simulate


def fastest(p: int, m: int, p2p: float, memory: float) -> str:
    times = {}
    for name in SCHEDULES:
        schedule = build(name, p, m)
        weights = [1 / schedule.chunks] * schedule.num_stages
        timeline = simulate(schedule, Costs(p2p=p2p, weights=weights))
        if max(live for curve in memory_curves(timeline) for _, live in curve) <= memory:
            times[name] = timeline.step_time
    return min(times, key=lambda name: times[name])
