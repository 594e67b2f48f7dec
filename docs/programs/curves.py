"""Curves of runs over their steps, from their metrics.jsonl:

python -m docs.programs.curves rewards runs/seed1 runs/seed2 --out docs/pictures/rewards.svg
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from docs.programs.svg import RUNS, Panel
from workbench.drawing.draw_svg import WIDTH, Svg

LEFT, TOP, HEIGHT, GAP = 60, 20, 220, 50  # pixels


class Curves(NamedTuple):
    """The numbers of a diagram, with the thickness of their lines, and values that its axis includes in any case."""

    title: str
    thickness: dict[str, float]
    includes: tuple[float, ...] = ()


PICTURES = {
    "rewards": (
        Curves("reward (thin: samples; thick: held-out prompts)", {"reward": 1, "evaluation": 3}, (0, 1)),
        Curves("share of samples that ended", {"ended": 2}, (0, 1)),
    ),
    "losses": (Curves("loss", {"loss": 3}), Curves("gradient norm", {"grad_norm": 3}, (0,))),
}


def draw(folders: list[Path], diagrams: tuple[Curves, ...], nested: bool) -> Svg:
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
    return svg


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoint.save_dir of each run")
    parser.add_argument("--out", type=Path, required=True, help=".svg file")
    options = parser.parse_args()
    options.out.write_text(str(draw(options.folders, PICTURES[options.picture], options.picture == "losses")))
