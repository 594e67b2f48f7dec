"""Levels of the Pipeline Schedule Tutor, and the fastest schedules that the search finds for them:

    python -m docs.programs.tutor

The levels are those of js/levels.js in github.com/ezyang/pipeline-parallelism-tutor at 4cf0b72. Times are in slots,
activations in micro-batches in one stage, and `par` is the time of the Tutor's own schedule.
"""

from typing import NamedTuple

from workbench.console import text_table
from workbench.schedules.search import Found, Shape, fastest_schedule
from workbench.schedules.simulate import Costs, simulate

WHOLE = Costs(B=1, I=1, W=9)  # halves of a backward, which these levels do not have, are too slow to use


class Level(NamedTuple):
    name: str
    pp: int
    micro_batches: int
    cap: int  # activations of a rank
    par: int
    costs: Costs = WHOLE
    shape: Shape = (1, "loop")

    def solve(self) -> Found:
        return fastest_schedule(self.pp, self.micro_batches, self.cap / self.shape[0], {self.shape: self.costs})


LEVELS = {
    "1f1b": Level("4. 1F1B", 4, 8, 4, 22),
    "interleaved": Level("6. Interleaved", 4, 8, 8, 38, shape=(2, "V")),
    "ragged": Level("7. Ragged rounds", 3, 4, 6, 22, shape=(2, "loop")),
    "b-twice-f": Level("8. Backward costs 2x", 4, 8, 4, 33, Costs(I=2, W=9)),
    "zero-bubble": Level("9. Zero bubble", 4, 8, 4, 27, Costs()),
    "zb-h2": Level("10. ZB-H2", 4, 8, 8, 27, Costs()),
}


def link(key: str) -> str:
    """Return the address that opens the found schedule in the Tutor: each rank's moves, and waits of one slot."""
    moves = []
    for rank, spans in enumerate(simulate(LEVELS[key].solve().schedule, LEVELS[key].costs).spans):
        free = 0
        for action, start, end in spans:
            (part,) = action.parts
            kind = "B" if part.kind == "I" else part.kind
            moves += [(slot, f"{rank}:.") for slot in range(free, round(start))]
            moves.append((round(start), f"{rank}:{kind}{part.stage}_{part.micro_batch}"))
            free = round(end)
    played = ",".join(move for _, move in sorted(moves, key=lambda move: move[0]))
    return f"https://ezyang.github.io/pipeline-parallelism-tutor/#level={key}&a={played}"


if __name__ == "__main__":
    rows = [["level", "ranks", "stages", "micro-batches", "cap", "par", "found", "at least"]]
    for level in LEVELS.values():
        found, numbers = level.solve(), [level.pp, level.pp * level.shape[0], level.micro_batches, level.cap, level.par]
        rows.append([level.name, *(f"{number:g}" for number in (*numbers, found.score, found.bound))])
    print(text_table(rows, first_number=1))
