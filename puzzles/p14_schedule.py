"""Puzzle 14, pipeline: the best of seven schedules.

To read: docs/pipeline_parallel.md, "Draw a schedule". Check your answer with `python -m puzzles 14`.
"""

from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, memory_curves, simulate


def fastest(p: int, m: int, p2p: float, memory: float) -> str:
    """Return the name of the schedule with the shortest step on p ranks with m micro-batches: a key of SCHEDULES.

    A message takes p2p, in forwards of a micro-batch on a rank. No rank may hold more activations than `memory`, in
    micro-batches. 1F1B always fits here.

    `simulate(build(name, p, m), Costs(p2p=p2p))` returns a timeline. Its `step_time` is the time of a step, and
    `memory_curves(timeline)` the activations of each rank: a list of (time, activations from that time on).
    Try `python -m picotron.schedules.draw --schedule zbv --pp 4 --microbatches 8 --p2p 0.1` with several schedules
    before you write any code: which ones win if messages are slow, and which if memory is short?
    """
    raise NotImplementedError
