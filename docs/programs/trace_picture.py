"""Picture of recorded steps: the matrix products of backward above the all-reduces, on one time axis.

python -m docs.programs.trace_picture after_backward.json in_hooks.json --out docs/pictures/overlap.svg

The files are traces of torch.profiler with an event `backward`, such as docs/solutions/measure.py records.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from docs.programs.svg import LINE, WIDTH, Svg
from workbench.drawing.draw_svg import COLOURS


class Span(NamedTuple):
    """An event of a row, such as "backward", in milliseconds after the start of backward."""

    row: str
    start: float
    end: float


def spans(trace: Path) -> list[Span]:
    """Return the matrix products of backward and the all-reduces of a trace, a row for each thread of gloo."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    backward = next(event for event in events if event["name"] == "backward")
    products = [event for event in events if event["name"] == "aten::mm" and event["ts"] >= backward["ts"]]
    sums = [event for event in events if event["name"] == "gloo:all_reduce"]
    threads = sorted({event["tid"] for event in sums})
    rows = [("backward", event) for event in products]
    rows += [(f"all-reduce {threads.index(event['tid'])}", event) for event in sums]
    return [
        Span(row, (event["ts"] - backward["ts"]) / 1000, (event["ts"] + event["dur"] - backward["ts"]) / 1000)
        for row, event in sorted(rows, key=lambda each: each[1]["ts"])
    ]


def draw(traces: dict[str, list[Span]]) -> str:
    """Draw a panel for each trace, under its title."""
    left, row, gap = 120, 26, 4
    rows = sorted({span.row for each in traces.values() for span in each}, key=lambda name: name != "backward")
    longest = max(span.end for each in traces.values() for span in each)
    scale, panel = (WIDTH - left - 20) / longest, LINE + 14 + len(rows) * (row + gap)
    picture = Svg(WIDTH, panel * len(traces) + 54)
    for number, (title, each) in enumerate(traces.items()):
        top, end = number * panel + LINE, max(span.end for span in each)
        picture.text(0, top - 7, f"{title}: {end:.0f} ms", "title")
        for index, name in enumerate(rows):
            picture.text(0, top + index * (row + gap) + 19, name)
            picture.frame(left, top + index * (row + gap), end * scale, row)
        for span in each:
            colour, y = COLOURS["B" if span.row == "backward" else "R"], top + rows.index(span.row) * (row + gap)
            width = (span.end - span.start) * scale
            picture.box(left + span.start * scale, y, width, row, colour, title=f"{span.end - span.start:.1f} ms")
    every = max(10, round(longest / 8, -1))
    picture.time_axis(left, panel * len(traces), scale, longest, int(every), "ms after the start of backward")
    return str(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="traces; the name of a file is the title of its panel")
    parser.add_argument("--out", type=Path, required=True, help="the .svg file to write")
    options = parser.parse_args()
    titles = {trace.stem.replace("_", " "): spans(trace) for trace in options.traces}
    options.out.write_text(draw(titles), encoding="utf-8")


if __name__ == "__main__":
    main()
