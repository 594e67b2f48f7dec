"""Check of puzzle 14: the step is as short as that of AFAB with the same messages; the score is what ranks hold."""

from types import ModuleType

from puzzles.checks.p12_1f1b import only_forwards_and_backwards, schedule_of
from puzzles.report import Report, Score, require
from workbench.drawing.draw_svg import as_svg
from workbench.schedules.schedules import build
from workbench.schedules.simulate import Costs, peak_activations, simulate

CASES = [(2, 8, 0.0), (2, 8, 2.0), (4, 2, 1.0), (1, 3, 1.0), (3, 12, 2.5), (8, 24, 0.4), (4, 16, 1.0)]  # p, m, p2p
PAR = 16  # 1 + 3 + 5 + 7


def check(learner: ModuleType, _: object, report: Report) -> None:
    for p, m, p2p in CASES:
        where, costs = f"p = {p}, m = {m}, p2p = {p2p:g}", Costs(p2p=p2p)
        schedule = schedule_of(learner, report, p, m, where, p, m, p2p)
        only_forwards_and_backwards(schedule, where)
        timeline, limit = simulate(schedule, costs), simulate(build("afab", p, m), costs).step_time
        report.picture = as_svg(timeline)
        sentence = f"{where}: the step takes as long as {timeline.step_time:g} forwards, but that of AFAB {limit:g}"
        require(timeline.step_time <= limit * (1 + 1e-9), sentence)
    held = sum(map(peak_activations, timeline.programs))
    report.score = Score("micro-batches held", held, PAR, PAR, "{:g}")
