"""Tables 5 and 9 of the zero-bubble paper (Qi et al. 2023, arXiv:2401.10241), and its measure of a bubble."""

import json
from typing import NamedTuple

from workbench.schedules.schedules import build
from workbench.schedules.search import fastest_schedule
from workbench.schedules.simulate import Costs, Timeline, simulate


class Case(NamedTuple):
    """A model on p ranks, with m micro-batches: the profiled times of F, B (here I), W and a message in milliseconds,
    and the paper's bubble rates.

    A layer's W needs 32 D of the 34 D + 5 H T numbers that its forward saves per token (T is 1,024).
    """

    model: str
    hidden: int
    heads: int
    p: int
    m: int
    F: float
    I: float  # noqa: E741
    W: float
    p2p: float
    of_1f1b: float
    of_zb_h1: float
    of_zb_1p: float
    of_zb_2p: float

    @property
    def costs(self) -> Costs:
        return Costs(F=self.F, B=self.I + self.W, I=self.I, W=self.W, p2p=self.p2p)

    def rate(self, timeline: Timeline) -> float:
        """The bubble rate of a timeline. No rank counts the time before its first and after its last action."""
        return 1 - self.m * (self.F + self.I + self.W) / longest_span(timeline)

    def rate_of(self, name: str) -> float:
        """The bubble rate of a hand-made schedule."""
        return self.rate(simulate(build(name, self.p, self.m), self.costs))

    def searched_rate(self, memory: int) -> float:
        """The bubble rate of the best schedule for `memory` micro-batches: p in ZB-1p, 2 p in ZB-2p."""
        deferred = 32 * self.hidden / (34 * self.hidden + 5 * self.heads * 1024)
        found = fastest_schedule(self.p, self.m, memory, {(1, "loop"): self.costs}, deferred, longest_span)
        return self.rate(simulate(found.schedule, found.costs))


def longest_span(timeline: Timeline) -> float:
    return max(spans[-1].end - spans[0].start for spans in timeline.spans)


TABLE = """
model    D   H   p    m       F       I       W  message    1F1B   ZB-H1   ZB-1p   ZB-2p
1.5B   2304  24   8   24  18.522  18.086   9.337    0.601  0.2431  0.1585  0.1585  0.0433
1.5B   2304  24   8   32  18.513  18.086   9.331    0.626  0.1985  0.1242  0.1242  0.0039
1.5B   2304  24   8   64  18.546  18.097   9.321    0.762  0.1240  0.0674  0.0674  0.0026
6.2B   4096  32   8   24  29.718  29.444  19.927    0.527  0.2347  0.1323  0.1323  0.0029
6.2B   4096  32   8   32  29.802  29.428  19.530    0.577  0.1898  0.1045  0.1045  0.0022
6.2B   4096  32   8   64  29.935  29.621  19.388    0.535  0.1091  0.0554  0.0554  0.0010
14.6B  5120  40  16   48  11.347  11.248   8.132    0.377  0.2552  0.1397  0.1397  0.0066
14.6B  5120  40  16   64  11.307  11.254   8.101    0.379  0.2082  0.1088  0.1088  0.0054
14.6B  5120  40  16  128  11.325  11.308   8.109    0.378  0.1251  0.0576  0.0576  0.0028
28.3B  5120  40  32   96  10.419  10.207   7.715    0.408  0.2646  0.1421  0.1421  0.0038
28.3B  5120  40  32  128  10.408  10.204   7.703    0.408  0.2168  0.1106  0.1106  0.0029
28.3B  5120  40  32  256  10.402  10.248   7.698    0.460  0.1352  0.0594  0.0594  0.0018
"""
CASES = [Case(model, *map(json.loads, numbers)) for model, *numbers in map(str.split, TABLE.splitlines()[2:])]
