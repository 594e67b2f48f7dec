"""Picture of runs of examples/grpo.py: rewards, and the share of samples that ended.

python -m docs.programs.rewards runs/grpo1 runs/grpo2 --out rewards.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from docs.programs.svg import RUNS, WIDTH, Svg

LEFT, TOP, HEIGHT, GAP = 60, 20, 220, 50  # pixels
PANELS = (
    ("reward (thin: samples; thick: held-out prompts)", (("reward", 1), ("evaluation", 3))),
    ("share of samples that ended", (("ended", 2),)),
)


def draw(folders: list[Path]) -> Svg:
    """Draw two panels over the steps: above, the mean reward of the samples as a thin line and that of the likeliest
    answers to held-out prompts as a thick one; below, the share of samples that ended.
    """
    runs = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    steps, width = max(run[-1]["step"] for run in runs), WIDTH - LEFT - 20
    svg = Svg(WIDTH, TOP + 2 * HEIGHT + GAP + 70)
    for panel, (title, lines) in enumerate(PANELS):
        bottom = TOP + HEIGHT + panel * (HEIGHT + GAP)
        found = [record[key] for run in runs for record in run for key, _ in lines if key in record]
        low, high = min(0.0, *found), max(1.0, *found)

        def place(step: float, value: float, low: float = low, high: float = high, bottom: int = bottom) -> Any:
            return LEFT + width * step / steps, bottom - HEIGHT * (value - low) / (high - low)

        for value in (low + (high - low) * quarter / 4 for quarter in range(5)):
            svg.line(*place(0, value), *place(steps, value))
            svg.text(8, place(0, value)[1] + 5, f"{value:.2f}")
        for step in range(0, steps + 1, max(1, steps // 10)):
            svg.text(place(step, low)[0], bottom + 22, str(step), "centred")
        for colour, run in zip(RUNS, runs, strict=False):
            for key, thickness in lines:
                points = [place(record["step"], record[key]) for record in run if key in record]
                text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                svg.parts.append(
                    f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>'
                )
        svg.text(LEFT + 8, bottom - HEIGHT + 18, title)
    bottom = TOP + 2 * HEIGHT + GAP
    x = svg.keys(LEFT, bottom + 38, *((colour, folder.name) for colour, folder in zip(RUNS, folders, strict=False)))
    svg.text(x + 10, bottom + 52, "horizontal: step")
    return svg


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoint.save_dir of each run")
    parser.add_argument("--out", type=Path, required=True, help=".svg file")
    options = parser.parse_args()
    options.out.write_text(str(draw(options.folders)))
