"""V-Min as a CSV file: a schedule that needs little memory, for many ranks about a third of what 1F1B needs.

    python -m docs.programs.v_min 4 8 > docs/schedules/v_min_4_8.csv

V-Min (Qi et al. 2024, arXiv:2405.15362) places the stages in a V and repeats one pattern for each micro-batch. A
forward or half of a backward of a stage is one unit of time, and each starts as soon as that of the stage before it has
ended: down the V and up again, and then back the same way. So a micro-batch lives for about 4 p units. The next one
starts 6 units later, which is the work of a rank for one micro-batch. The W of a stage takes the first unit of a rank
that the other actions leave free. (The paper also reorders actions at both ends of the step. This program does not.)
"""

import sys
from itertools import count

from picotron.schedules.actions import Action
from picotron.schedules.schedule_csv import as_csv

PERIOD = 6  # units: F, I and W of two stages


def v_min(rank: int, pp: int, microbatches: int) -> list[Action]:
    """Return the program of one rank."""
    down, up = rank, 2 * pp - 1 - rank
    pause = 2 if pp % 3 == 0 else 0  # at the end of the V; without it, forwards and backwards would collide
    starts = {("F", down): down, ("F", up): up}
    starts |= {("I", up): 2 * pp + pause + rank, ("I", down): 4 * pp + pause - 1 - rank}
    for stage in (up, down):
        taken = {start % PERIOD for start in starts.values()}
        starts["W", stage] = next(time for time in count(starts["I", stage] + 1) if time % PERIOD not in taken)
    repeated = [(start + PERIOD * i, Action(*key, i)) for key, start in starts.items() for i in range(microbatches)]
    return [action for _, action in sorted(repeated)]


if __name__ == "__main__":
    pp, microbatches = map(int, sys.argv[1:])
    print(as_csv([v_min(rank, pp, microbatches) for rank in range(pp)]), end="")
