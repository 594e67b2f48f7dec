"""Pictures of runs: curves over their steps, from their metrics.jsonl, and the overlap of a recorded step.

python -m docs.programs.run_pictures rewards runs/seed1 runs/seed2 --out docs/pictures/rewards.svg
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from docs.programs.svg import RUNS, Panel, Span, main, spans
from workbench.drawing.draw_svg import COLOURS, WIDTH, Svg

LEFT, TOP, HEIGHT, GAP = 60, 20, 220, 50  # pixels
ROWS = ("backward", "all-reduce 0", "all-reduce 1")  # gloo has two threads


class Curves(NamedTuple):
    """The numbers of a diagram, with the thickness of their lines, and values that its axis includes in any case."""

    title: str
    thickness: dict[str, float]
    includes: tuple[float, ...] = ()


def curves(folders: Sequence[Path], *diagrams: Curves, nested: bool = False) -> str:
    """Draw diagrams over the steps, one above the other, with lines of a colour for each run.

    Args:
        nested: whether the first runs have wider lines, so that equal ones can be seen.
    """
    runs = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    steps = max(run[-1]["step"] for run in runs)
    svg = Svg(WIDTH, TOP + len(diagrams) * (HEIGHT + GAP) + 20)
    for number, diagram in enumerate(diagrams):
        top = TOP + number * (HEIGHT + GAP)
        found = [record[key] for run in runs for record in run for key in diagram.thickness if key in record]
        low, high = min(*diagram.includes, *found), max(*diagram.includes, *found)
        panel = Panel(svg, LEFT, top, WIDTH - LEFT - 20, HEIGHT, (0, steps), (low, high))
        for value in (low + (high - low) * quarter / 4 for quarter in range(5)):
            svg.line(*panel.place(0, value), *panel.place(steps, value))
            svg.text(8, panel.place(0, value)[1] + 5, f"{value:.2f}")
        panel.scales({step: str(step) for step in range(0, steps + 1, max(1, steps // 10))}, {})
        for i, run in enumerate(runs):
            for key, thickness in diagram.thickness.items():
                points = [(record["step"], record[key]) for record in run if key in record]
                panel.line(points, RUNS[i], thickness + nested * 5 * (len(runs) - 1 - i))
        svg.text(LEFT + 8, top + 18, diagram.title)
    bottom = TOP + len(diagrams) * (HEIGHT + GAP) - 12
    x, _ = svg.keys(LEFT, bottom, *((colour, folder.name) for colour, folder in zip(RUNS, folders, strict=False)))
    svg.text(x + 10, bottom + 14, "horizontal: step")
    return str(svg)


def rewards(*folders: Path) -> str:
    return curves(
        folders,
        Curves("reward (thin: samples; thick: held-out prompts)", {"reward": 1, "evaluation": 3}, (0, 1)),
        Curves("share of samples that ended", {"ended": 2}, (0, 1)),
    )


def losses(*folders: Path) -> str:
    return curves(folders, Curves("loss", {"loss": 3}), Curves("gradient norm", {"grad_norm": 3}, (0,)), nested=True)


def spans_of(trace: Path) -> list[Span]:
    """Return the matrix products of backward and the all-reduces of a trace, a row for each thread of gloo."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    backward = next(event for event in events if event["name"] == "backward")
    sums = [event for event in events if event["name"] == "gloo:all_reduce"]
    threads = sorted({event["tid"] for event in sums})
    products = (event for event in events if event["name"] == "aten::mm" and event["ts"] >= backward["ts"])
    rows = [(ROWS[0], "B", event) for event in products]
    rows += [(ROWS[1 + threads.index(event["tid"])], "R", event) for event in sums]
    return [
        Span(
            row,
            (event["ts"] - backward["ts"]) / 1000,
            (event["ts"] + event["dur"] - backward["ts"]) / 1000,
            COLOURS[kind],
        )
        for row, kind, event in rows
    ]


def overlap(*traces: Path) -> str:
    """Draw the matrix products of backward above the all-reduces, for each trace of torch.profiler with an event
    `backward`, such as docs/solutions/measure.py records.
    """
    panels = {trace.stem.replace("_", " "): spans_of(trace) for trace in traces}
    return spans(panels, ROWS, "ms after the start of backward")


if __name__ == "__main__":
    main(__doc__, rewards, losses, overlap)
