"""Pictures of runs: curves over their steps, from their metrics.jsonl.

python -m docs.programs.run_pictures rewards runs/seed1 runs/seed2 --out docs/pictures/rewards.svg
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.programs.svg import RUNS, main, plots

Limits = tuple[float | None, float | None]


def curves(
    folders: Sequence[Path], *diagrams: tuple[str, dict[str, float], Limits], height: float, nested: bool = False
) -> str:
    """Draw diagrams over the steps, one above the other, with lines of a colour for each run.

    Args:
        diagrams: titles, the numbers with the thickness of their lines, and limits of the axes.
        nested: whether the first runs have wider lines, so that equal ones can be seen.
    """

    def draw(*panels: Any) -> None:
        for panel, (title, thickness, limits) in zip(panels, diagrams, strict=True):
            for i, (folder, colour) in enumerate(zip(folders, RUNS, strict=False)):
                run = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                for key, width in thickness.items():
                    points = [(record["step"], record[key]) for record in run if key in record]
                    width += 5 * (len(folders) - 1 - i) * nested
                    (line,) = panel.plot(*zip(*points, strict=True), color=colour, linewidth=width)
                line.set_label(folder.name)
            panel.set_title(title, loc="left")
            panel.set_ylim(*limits)
        panel.set_xlabel("step")
        panel.legend()

    return plots(len(diagrams), 1, height, draw)


def rewards(*folders: Path) -> str:
    reward = "reward (thin: samples; thick: held-out prompts)", {"reward": 1.0, "evaluation": 3.0}, (0.0, 1.0)
    return curves(folders, reward, ("share of samples that ended", {"ended": 2}, (0, 1)), height=0.6)


def losses(*folders: Path) -> str:
    norm = "gradient norm", {"grad_norm": 3.0}, (0.0, None)
    return curves(folders, ("loss", {"loss": 3}, (None, None)), norm, height=0.6, nested=True)


if __name__ == "__main__":
    main(__doc__, rewards, losses)
