"""Check of puzzle 13: a schedule that can run, its activations and its bubble. Also writes it as CSV, to train with."""

from types import ModuleType

from puzzles.checks.p12_1f1b import schedule_of
from puzzles.report import Report, Score, require
from workbench.drawing.draw_svg import as_svg
from workbench.schedules.schedules import build
from workbench.schedules.simulate import peak_activations, simulate

P, M, MOST = 4, 8, 4
PAR = 5 / 29  # rank r delays its last r W, as in the solution


def check(learner: ModuleType, _: object, report: Report) -> None:
    timeline = simulate(schedule_of(learner, report, P, M, f"p = {P}, m = {M}"))
    report.picture = as_svg(timeline)
    for rank, actions in enumerate(timeline.programs):
        peak = peak_activations(actions)
        require(peak <= MOST, f"rank {rank} holds the activations of {peak} micro-batches, expected at most {MOST}")
    lines = (",".join(map(str, actions)) for actions in timeline.programs)
    report.files["p13_bubble.csv"] = "\n".join(lines) + "\n"
    best = simulate(build("zb_h1", P, M)).bubble
    report.score = Score("bubble", 100 * timeline.bubble, 100 * PAR, 100 * best, "{:.1f} %")
