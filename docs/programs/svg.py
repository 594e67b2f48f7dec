"""SVG drawings for the pages: shapes, text, arrows and timelines. Text is 14 px high in a README, 830 px wide."""

from collections.abc import Sequence
from html import escape

from picotron.drawing.draw_svg import COLOURS, MEANING, STYLE, boxes, kinds
from picotron.schedules.simulate import Timeline

WIDTH = 960  # pixels, as all sizes here; GitHub shows a README 830 px wide
LINE, CHARACTER = 23, 9.2  # height of a line of text, and the mean width of a character in a wide font
RANKS = [COLOURS[kind] for kind in "FBWIR"]  # colours of the first five ranks
TEXT = """
text { font-size: 17px }
.title { font-weight: 600 }
.centred { text-anchor: middle }
.arrow { stroke: #888; stroke-width: 1.5; fill: #888 }
.memory { fill: #888; fill-opacity: 0.6 }
"""


class Svg:
    """A drawing, to which methods add shapes."""

    def __init__(self, width: float, height: float) -> None:
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}{TEXT}</style>"]

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

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line class="arrow" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, double: bool = False) -> None:
        """Add an arrow from (x1, y1) to (x2, y2), or between them."""
        self.line(x1, y1, x2, y2)
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        for x, y, sign in ((x2, y2, 1), (x1, y1, -1)) if double else ((x2, y2, 1),):
            back = (x - 8 * sign * dx, y - 8 * sign * dy)  # the base of the arrowhead
            points = [(x, y), (back[0] - 4 * dy, back[1] + 4 * dx), (back[0] + 4 * dy, back[1] - 4 * dx)]
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
        for kind in kinds(*timelines):
            name = MEANING[kind] if kind in "FB" else f"{kind}: {MEANING[kind]}"
            self.box(x, y, 18, 18, COLOURS[kind], title=name)
            self.text(x + 25, y + 14, name)
            x += 25 + CHARACTER * len(name) + 16
        self.frame(x, y, 18, 18)
        self.text(x + 25, y + 14, "idle")

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])
