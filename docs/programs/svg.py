"""SVG drawings for the pages: shapes, text, arrows and timelines. Text is 14 px high in a README, 830 px wide.

A colour means the same in all pictures: `COLOURS` are actions, `RANKS` ranks, `TENSORS` kinds of tensors, `RUNS` runs
and other lines.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from workbench.drawing.draw_svg import COLOURS, MEANING, STYLE, boxes, kinds
from workbench.schedules.simulate import Timeline

WIDTH, MARGIN = 960, 12  # pixels, as all sizes here; GitHub shows a README 830 px wide
LINE, CHARACTER = 23, 9.2  # height of a line of text, and the mean width of a character in a wide font
RANKS = ["#8a82dc", "#c58fdb", "#eda5c6", "#fbcdb9", "#fdf0cf"]  # darker first, so that they differ in grey, too
TENSORS = {  # those that stay between steps are green, the others brown (ColorBrewer's BrBG)
    "weights": "#4aa59d",
    "gradients": "#8fd3c8",
    "optimizer": "#bbe2dc",
    "activations": "#d3a95a",
    "temporary": "#f3e2b6",
}
RUNS = ["#2a8fd0", "#d9662b", "#1c9c78", "#b0559a", "#8d8420"]  # of lines and dots: legible on white and on black
TEXT = """
text { font-size: 17px }
.title { font-weight: 600 }
.centred { text-anchor: middle }
.arrow { stroke: #888; stroke-width: 1.5; fill: #888 }
.bent { fill: none }
.memory { fill: #888; fill-opacity: 0.6 }
"""


class Svg:
    """A drawing on a white or (in dark mode) black page, to which methods add shapes."""

    def __init__(self, width: float, height: float, style: str = "") -> None:
        place = [f"{number:g}" for number in (-MARGIN, -MARGIN, width + 2 * MARGIN, height + 2 * MARGIN)]
        size = f'viewBox="{" ".join(place)}" width="{place[2]}" height="{place[3]}"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}{TEXT}{style}</style>",
            '<rect class="page" x="{}" y="{}" width="{}" height="{}"/>'.format(*place),
        ]

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", title: str = ""
    ) -> None:
        """Add a rectangle. Its label is left out if it does not fit; hovering over the rectangle shows its title."""
        place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self.parts.append(
            f'<rect class="action" {place} fill="{colour}"><title>{escape(title or label)}</title></rect>'
        )
        if label and width > CHARACTER * len(label) and height >= 16:
            self.text(x + width / 2, y + height / 2 + 5.5, label, "label")

    def triangle(self, x: float, y: float, size: float, colour: str) -> None:
        """Add the half of a square on and below its diagonal."""
        points = f"{x:.2f},{y:.2f} {x:.2f},{y + size:.2f} {x + size:.2f},{y + size:.2f}"
        self.parts.append(f'<polygon class="action" points="{points}" fill="{colour}"/>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Add a grey rectangle."""
        place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self.parts.append(f'<rect class="idle" {place}/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Add a line of text that begins at x, or is centred there if its kind is `label` (in black) or `centred`."""
        self.parts.append(f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}">{escape(text)}</text>')

    def keys(self, x: float, y: float, *names: tuple[str, str]) -> float:
        """Add colours (none for grey) with their names from x on. Returns where they end."""
        for colour, name in names:
            if colour:
                self.box(x, y, 18, 18, colour, title=name)
            else:
                self.frame(x, y, 18, 18)
            self.text(x + 25, y + 14, name)
            x += 25 + CHARACTER * len(name) + 16
        return x

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line class="arrow" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>')

    def arrow(self, *points: float, double: bool = False, title: str = "") -> None:
        """Add an arrow along the points x1, y1, x2, y2, ..., with a head at its end, or at both ends."""
        along = list(zip(points[::2], points[1::2], strict=True))
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in along)
        self.parts.append(f'<polyline class="arrow bent" points="{text}"><title>{escape(title)}</title></polyline>')
        self._head(along[-2], along[-1])
        if double:
            self._head(along[1], along[0])

    def _head(self, before: tuple[float, ...], end: tuple[float, ...]) -> None:
        length = math.dist(before, end)
        dx, dy = (end[0] - before[0]) / length, (end[1] - before[1]) / length
        x, y = end[0] - 8 * dx, end[1] - 8 * dy  # the base of the arrowhead
        points = [end, (x - 4 * dy, y + 4 * dx), (x + 4 * dy, y - 4 * dx)]
        text = " ".join(f"{a:.2f},{b:.2f}" for a, b in points)
        self.parts.append(f'<polygon class="arrow" points="{text}"/>')

    def timeline(self, timeline: Timeline, x: float, y: float, scale: float, row: float, gap: float) -> None:
        """Add a row of boxes for each pp rank.

        Args:
            scale: pixels per unit of time.
            row: height of a row.
            gap: space between two rows.
        """
        for rank in range(len(timeline.spans)):
            self.frame(x, y + rank * (row + gap), timeline.step_time * scale, row)
        for box in boxes(timeline):
            top, width = y + box.rank * (row + gap) + box.top * row, (box.end - box.start) * scale
            self.box(x + box.start * scale, top, width, box.height * row, box.colour, box.label, box.title)

    def curve(self, curve: Sequence[tuple[float, float]], x: float, bottom: float, scale: float, unit: float) -> None:
        """Add the area below steps, given as (time, value): `scale` pixels wide per time, `unit` high per value."""
        points, height = [(x, bottom)], 0.0
        for time, value in curve:
            points += [(x + time * scale, bottom - height * unit), (x + time * scale, bottom - value * unit)]
            height = value
        text = " ".join(f"{a:.2f},{b:.2f}" for a, b in points)
        self.parts.append(f'<polygon class="memory" points="{text}"/>')

    def time_axis(self, x: float, y: float, scale: float, duration: float, every: int, unit: str) -> None:
        """Add an axis below a timeline, with a number at every n-th unit of time."""
        self.line(x, y, x + duration * scale, y)
        for time in range(0, int(duration) + 1, every):
            self.line(x + time * scale, y, x + time * scale, y + 5)
            self.text(x + time * scale, y + 20, str(time), "centred")
        self.text(x, y + 42, f"time ({unit})")

    def legend(self, x: float, y: float, *timelines: Timeline) -> None:
        """Add the colours of the actions that occur, and of idle time."""
        names = {kind: MEANING[kind] if kind in "FB" else f"{kind}: {MEANING[kind]}" for kind in kinds(*timelines)}
        self.keys(x, y, *((COLOURS[kind], name) for kind, name in names.items()), ("", "idle"))

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


class Panel(NamedTuple):
    """A diagram in a drawing. On a logarithmic axis, numbers and limits are logarithms.

    Args:
        left, top, width, height: its place, in pixels.
        across, up: the limits of its axes.
    """

    svg: Svg
    left: float
    top: float
    width: float
    height: float
    across: tuple[float, float]
    up: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels of a point."""
        right, above = (
            (each - low) / (high - low) for each, (low, high) in zip((x, y), (self.across, self.up), strict=True)
        )
        return self.left + right * self.width, self.top + (1 - above) * self.height

    def line(self, points: Sequence[tuple[float, float]], colour: str, thickness: float = 3) -> None:
        text = " ".join("{:.1f},{:.1f}".format(*self.place(*point)) for point in points)
        self.svg.parts.append(f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{thickness:g}"/>')

    def dot(self, x: float, y: float, colour: str, title: str = "") -> None:
        place = 'cx="{:.1f}" cy="{:.1f}"'.format(*self.place(x, y))
        self.svg.parts.append(
            f'<circle class="action" {place} r="5" fill="{colour}"><title>{escape(title)}</title></circle>'
        )

    def scales(self, across: dict[float, str], up: dict[float, str]) -> None:
        """Add the numbers of both axes, below and on the left."""
        for x, text in across.items():
            self.svg.text(self.place(x, 0)[0], self.top + self.height + 22, text, "centred")
        for y, text in up.items():
            self.svg.text(self.left - 48, self.place(0, y)[1] + 6, text)


def main(description: str | None, *pictures: Callable[[], str]) -> None:
    """Run a program that draws one of these pictures, chosen by its name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=(by_name := {picture.__name__: picture for picture in pictures}))
    parser.add_argument("--out", type=Path, required=True, help="the .svg file to write")
    options = parser.parse_args()
    options.out.write_text(by_name[options.picture](), encoding="utf-8")
