"""SVG drawings, without a drawing package: shapes, text, arrows, and timelines."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from workbench.schedules.simulate import Timeline, computes, memory_curves, tick_distance

# Okabe and Ito's colours, which colour-blind people can distinguish; those of W and R are lighter, for black text.
COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0e442", "W": "#1fb58a", "R": "#d9a0c0"}
MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
    "R": "reduction of gradients",
}
MESSAGE = "#999999"
ROW, CURVE, GAP, LEFT = 24, 22, 8, 76  # pixels: a rank's row, the curve and the space below it, and width of labels
WIDTH, MARGIN = 960, 12  # of a picture, without its margin; GitHub shows a README 830 px wide
LINE, CHARACTER = 23, 9.2  # height of a line of text, and the mean width of a character in a wide font
# Idle time is grey on any background. The page and the colour of text follow the reader's light or dark mode; a picture
# has a page of its own, because it can stand on a white page in dark mode.
STYLE = """
text, body { font-family: system-ui, sans-serif; fill: #222; color: #222 }
.page { fill: #fff }
@media (prefers-color-scheme: dark) {
  text, body { fill: #ddd; color: #ddd; background: #1c1c1c }
  .page { fill: #1c1c1c }
}
text { font-size: 11px }
.label { fill: #000; text-anchor: middle; pointer-events: none }
.idle { fill: #888; fill-opacity: 0.25 }
.action { stroke: #fff; stroke-width: 0.5 }
"""
TEXT = """
text { font-size: 17px }
.title { font-weight: 600 }
.centred { text-anchor: middle }
.arrow { stroke: #888; stroke-width: 1.5; fill: #888 }
.bent { fill: none }
.memory { fill: #888; fill-opacity: 0.6 }
"""


def kinds(*timelines: Timeline) -> list[str]:
    """Return the kinds of actions that occur and have a colour, for a legend."""
    spans = (span for timeline in timelines for rank in timeline.spans for span in rank)
    occur = {part.kind for span in spans for part in span.action.parts}
    return [kind for kind in COLOURS if kind in occur]


def lighter(colour: str, amount: float) -> str:
    """Lighten a colour like #1fb58a by an amount from 0 (unchanged) to 1 (white)."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * amount):02x}" for channel in channels)


def coordinates(points: Iterable[tuple[float, ...]]) -> str:
    """Write points as an SVG does: x,y x,y ..."""
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)


class Svg:
    """A drawing on a white or (in dark mode) black page, to which methods add shapes."""

    def __init__(self, width: float, height: float = 0) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

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

    def keys(self, x: float, y: float, *names: tuple[str, str]) -> tuple[float, float]:
        """Add colours (none for grey) with their names from x on, in as many lines as needed. Returns the end."""
        left = x
        for colour, name in names:
            if x + 25 + CHARACTER * len(name) > self.width:
                x, y = left, y + LINE
            if colour:
                self.box(x, y, 18, 18, colour, title=name)
            else:
                self.frame(x, y, 18, 18)
            self.text(x + 25, y + 14, name)
            x += 25 + CHARACTER * len(name) + 16
        return x, y

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line class="arrow" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>')

    def arrow(self, *points: float, double: bool = False, title: str = "") -> None:
        """Add an arrow along the points x1, y1, x2, y2, ..., with a head at its end, or at both ends."""
        along = list(zip(points[::2], points[1::2], strict=True))
        self.parts.append(
            f'<polyline class="arrow bent" points="{coordinates(along)}"><title>{escape(title)}</title></polyline>'
        )
        self._head(along[-2], along[-1])
        if double:
            self._head(along[1], along[0])

    def _head(self, before: tuple[float, ...], end: tuple[float, ...]) -> None:
        length = math.dist(before, end)
        dx, dy = (end[0] - before[0]) / length, (end[1] - before[1]) / length
        x, y = end[0] - 8 * dx, end[1] - 8 * dy  # the base of the arrowhead
        points = [end, (x - 4 * dy, y + 4 * dx), (x + 4 * dy, y - 4 * dx)]
        self.parts.append(f'<polygon class="arrow" points="{coordinates(points)}"/>')

    def timeline(self, timeline: Timeline, x: float, y: float, scale: float, row: float, gap: float) -> None:
        """Add a row of boxes for each pp rank. Each kind of action has a colour, lighter in later chunks. Boxes of
        messages and reductions are low, because these can overlap computations.

        Args:
            scale: pixels per unit of time.
            row: height of a row.
            gap: space between two rows.
        """
        for rank in range(len(timeline.spans)):
            self.frame(x, y + rank * (row + gap), timeline.step_time * scale, row)
        for rank, spans in enumerate(timeline.spans):
            stages = sorted({part.stage for span in spans for part in span.action.parts})
            for action, start, end in spans:
                title = f"{action}, pp rank {rank}, {start:.6g} to {end:.6g}"
                for i, part in enumerate(action.parts):
                    share = 1 / len(action.parts)
                    below, height, label = (
                        (i * share, share, f"{part.micro_batch}") if computes(action) else (3 / 4, 1 / 4, "")
                    )
                    colour = lighter(COLOURS.get(part.kind, MESSAGE), stages.index(part.stage) / len(stages))
                    place = x + start * scale, y + rank * (row + gap) + below * row, (end - start) * scale, height * row
                    self.box(*place, colour, label, title)

    def curve(
        self, curve: Sequence[tuple[float, float]], end: float, x: float, bottom: float, scale: float, unit: float
    ) -> None:
        """Add the area below steps, given as (time, value), to an end: `scale` pixels wide per time, `unit` high per
        value.
        """
        points, height = [(x, bottom)], 0.0
        for time, value in [*curve, (end, 0.0)]:
            points += [(x + time * scale, bottom - height * unit), (x + time * scale, bottom - value * unit)]
            height = value
        self.parts.append(f'<polygon class="memory" points="{coordinates(points)}"/>')

    def time_axis(self, x: float, y: float, scale: float, duration: float, unit: str = "") -> None:
        """Add an axis below a timeline, with at most a dozen numbers, and their unit."""
        self.line(x, y, x + duration * scale, y)
        distance = tick_distance(duration, most=12)
        for number in range(math.floor(duration / distance + 1e-9) + 1):
            at = x + number * distance * scale
            self.line(at, y, at, y + 5)
            self.text(at, y + 20, f"{number * distance:g}", "centred")
        if unit:
            self.text(x, y + 42, f"time ({unit})")

    def legend(self, x: float, y: float, *timelines: Timeline) -> float:
        """Add the colours of the actions that occur, and of idle time. Returns where the last line ends."""
        names = {kind: MEANING[kind] if kind in "FB" else f"{kind}: {MEANING[kind]}" for kind in kinds(*timelines)}
        return self.keys(x, y, *((COLOURS[kind], name) for kind, name in names.items()), ("", "idle"))[1] + LINE

    def __str__(self) -> str:
        place = [f"{number:g}" for number in (-MARGIN, -MARGIN, self.width + 2 * MARGIN, self.height + 2 * MARGIN)]
        size = f'viewBox="{" ".join(place)}" width="{place[2]}" height="{place[3]}"'
        page = '<rect class="page" x="{}" y="{}" width="{}" height="{}"/>'.format(*place)
        first = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}{TEXT}</style>", page]
        return "\n".join([*first, *self.parts, "</svg>\n"])


def as_svg(timeline: Timeline) -> str:
    """Draw a timeline as SVG: a legend, a row for each rank with the curve of its activations below, and a time axis.
    Hovering over an action shows its name and times. Text is 14 px high where GitHub shows the picture 830 px wide.
    """
    picture, curves = Svg(WIDTH), memory_curves(timeline)
    scale, each = (WIDTH - LEFT - 12) / timeline.step_time, ROW + CURVE + GAP
    peaks = [max(live for _, live in curve) for curve in curves]
    top = picture.legend(0, 0, timeline)
    if any(peaks):
        text = (
            f"Curves: activations, up to {max(peaks):.4g} {timeline.memory_unit}. The number below a rank is its peak."
        )
        picture.text(0, top + 15, text)
        top += LINE
    picture.timeline(timeline, LEFT, top, scale, ROW, CURVE + GAP)
    for rank, (curve, peak) in enumerate(zip(curves, peaks, strict=True)):
        bottom = top + rank * each + ROW + CURVE
        picture.text(0, bottom - CURVE - 6, f"pp {rank}")
        if any(peaks):
            picture.text(0, bottom - 3, f"{peak:.4g}")
            picture.curve(curve, timeline.step_time, LEFT, bottom, scale, CURVE / max(peaks))
    picture.height = top + len(curves) * each + LINE
    picture.time_axis(LEFT, picture.height - LINE - 4, scale, timeline.step_time)
    return str(picture)
