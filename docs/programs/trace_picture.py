"""Picture of recorded steps: the matrix products of backward above the all-reduces, on one time axis.

python -m docs.programs.trace_picture after_backward.json in_hooks.json --out docs/pictures/overlap.svg

The files are traces of torch.profiler with an event `backward`, such as docs/solutions/measure.py records.
"""

import argparse
import json
from pathlib import Path

from docs.programs.svg import Span, spans
from workbench.drawing.draw_svg import COLOURS

ROWS = ("backward", "all-reduce 0", "all-reduce 1")  # gloo has two threads


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="traces; the name of a file is the title of its panel")
    parser.add_argument("--out", type=Path, required=True, help="the .svg file to write")
    options = parser.parse_args()
    panels = {trace.stem.replace("_", " "): spans_of(trace) for trace in options.traces}
    options.out.write_text(spans(panels, ROWS, "ms after the start of backward"), encoding="utf-8")


if __name__ == "__main__":
    main()
