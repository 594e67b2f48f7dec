"""Check of puzzle 21: what each cause explains of a step's time, computed from the recorded traces and metrics."""

from pathlib import Path
from types import ModuleType

from puzzles.pictures import PALE, Cell, rows
from puzzles.report import RED, Report, require
from workbench.console import print_line, text_table
from workbench.files import parse_json
from workbench.schedules.trace import read_trace

FOLDER, RUNS = Path(__file__).parents[1] / "slow_runs", "abcdef"


def parts(run: Path) -> dict[str, float]:
    """Return the seconds of a recorded step by the cause that makes them more; they add up to its time."""
    step, timeline = read_trace(run)
    records = [parse_json(line, "a line") for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    first = min(rank[0].start for rank in timeline.spans)
    last = max(span.end for rank in timeline.spans for span in rank)
    seconds = [
        {kind: sum(span.end - span.start for span in rank if span.action.parts[0].kind == kind) for kind in "FB"}
        for rank in timeline.spans
    ]
    least, most = sorted(seconds, key=lambda rank: sum(rank.values()))[:: len(seconds) - 1]
    return {
        "late data": first,  # before anything is computed
        "small micro-batches": 3 * least["F"],  # a backward computes twice as much as a forward
        "recomputation": least["B"] - 2 * least["F"],
        "slow rank": sum(most.values()) - sum(least.values()),
        "bubble": last - first - sum(most.values()),  # time in which even the busiest rank is idle
        "exposed all-reduce": next(each["step_time"] for each in records if each["step"] == step) - last,
    }


def excess(run: str) -> dict[str, float]:
    """Return how many seconds longer than in the healthy run each part is."""
    healthy = parts(FOLDER / "healthy")
    return {cause: seconds - healthy[cause] for cause, seconds in parts(FOLDER / run).items()}


def check(learner: ModuleType, _: object, report: Report) -> None:
    named, lost = {}, {run: excess(run) for run in RUNS}
    for run in RUNS:
        named[run] = report.ask(learner, "cause", run)
        require(named[run] in lost[run], f"cause({run!r}) is {named[run]!r}; choose one of {', '.join(lost[run])}")
    explained = {run: max(0.0, lost[run][named[run]]) for run in RUNS}
    right = {run: explained[run] == max(lost[run].values()) for run in RUNS}
    lines = [
        (f"run {run}: {named[run]}", [Cell(f"{explained[run]:.2f} s", PALE if right[run] else RED, 3)]) for run in RUNS
    ]
    report.picture = rows("What your cause explains of each run's time", lines)
    for run in RUNS:
        require(
            right[run],
            f"run {run}: a step takes {sum(lost[run].values()):.2f} s longer than the healthy one; {named[run]!r} explains "
            f"{explained[run]:.2f} s of it, another cause more",
        )


if __name__ == "__main__":
    table = [[run, *(f"{seconds:+.2f}" for seconds in excess(run).values())] for run in RUNS]
    print_line(text_table([["run", *excess("a")], *table]))
