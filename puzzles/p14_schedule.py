"""Puzzle 14, pipeline: the best of seven schedules.

To read: docs/pipeline_parallel.md, "Draw a schedule". Check your answer with `python -m puzzles 14`.
"""

from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, memory_curves, simulate


def fastest(p: int, m: int, p2p: float, memory: float) -> str:
    """Return the name of the schedule with the shortest step on p ranks with m micro-batches: a key of SCHEDULES.

    A message takes p2p, in forwards of a micro-batch on a rank. No rank may hold more activations than `memory`, in
    micro-batches. (1F1B always fits here.)

    `build(name, p, m)` returns a schedule with `chunks` stages per rank, `num_stages` in all. `simulate(schedule,
    Costs(p2p=p2p, weights=[1 / schedule.chunks] * schedule.num_stages))` returns a timeline, in which a stage takes
    1 / chunks of a rank's time. Its `step_time` is the time of a step. `memory_curves(timeline)` has a list for each
    rank: pairs of a time, and the activations that the rank holds from that time on, in the unit of `memory`.
    """
    raise NotImplementedError
