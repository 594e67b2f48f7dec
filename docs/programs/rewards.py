"""Picture of the rewards of examples/grpo.py:

python -m docs.programs.rewards runs/grpo1 runs/grpo2 --out rewards.svg
"""

import argparse
import json
from pathlib import Path

from docs.programs.svg import RANKS, WIDTH, Svg

LEFT, TOP, HEIGHT = 60, 20, 260  # pixels


def draw(folders: list[Path]) -> Svg:
    """Draw the mean reward of each step as a thin line, and the evaluations as points on a thick one."""
    runs = [[json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()] for folder in folders]
    steps, width = max(run[-1]["step"] for run in runs), WIDTH - LEFT - 20
    svg = Svg(WIDTH, TOP + HEIGHT + 70)

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + width * step / steps, TOP + HEIGHT * (1 - value)

    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        svg.line(*place(0, value), *place(steps, value))
        svg.text(8, place(0, value)[1] + 5, f"{value:.2f}")
    for step in range(0, steps + 1, 20):
        svg.text(place(step, 0)[0], TOP + HEIGHT + 22, str(step), "centred")
    for colour, run, folder in zip(RANKS, runs, folders, strict=False):
        for key, thickness in (("reward", 1), ("evaluation", 3)):
            points = [place(record["step"], record[key]) for record in run if key in record]
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            svg.parts.append(f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>')
        x = LEFT + 130 * folders.index(folder)
        svg.box(x, TOP + HEIGHT + 38, 18, 18, colour, title=folder.name)
        svg.text(x + 25, TOP + HEIGHT + 52, folder.name)
    svg.text(LEFT + 8, TOP + 18, "mean reward")
    svg.text(LEFT + 130 * len(folders), TOP + HEIGHT + 52, "thin: samples, thick: evaluation; horizontal: step")
    return svg


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoint.save_dir of each run")
    parser.add_argument("--out", type=Path, required=True, help=".svg file")
    options = parser.parse_args()
    options.out.write_text(str(draw(options.folders)))
