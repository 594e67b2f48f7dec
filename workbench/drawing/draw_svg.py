"""Timelines as pictures, without a drawing package: an SVG of one timeline, an HTML page that compares several."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from workbench.schedules.simulate import Timeline, computes, memory_curves, summary, tick_distance

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
LINE, CHARACTER = 26, 9.2  # height of a line of text, and the mean width of a character in a wide font
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
OWN_STYLE = """
text { font-size: 17px }
.centred { text-anchor: middle }
.axis { stroke: #888; stroke-width: 1.5 }
.memory { fill: #888; fill-opacity: 0.6 }
"""


class Box(NamedTuple):
    """A rectangle: an action, or one part of an overlapped pair. `top` and `height` are fractions of a row."""

    rank: int
    start: float
    end: float
    top: float
    height: float
    colour: str
    label: str
    title: str


def boxes(timeline: Timeline) -> list[Box]:
    """Return the boxes of a timeline. Each kind of action has a colour, lighter in later chunks. Boxes of messages and
    reductions are low, because these can overlap computations.
    """
    drawn = []
    for rank, spans in enumerate(timeline.spans):
        stages = sorted({part.stage for span in spans for part in span.action.parts})
        for action, start, end in spans:
            title = f"{action}, pp rank {rank}, {start:.6g} to {end:.6g}"
            for i, part in enumerate(action.parts):
                share = 1 / len(action.parts)
                top, height, label = (i * share, share, str(part.micro_batch)) if computes(action) else (0.75, 0.25, "")
                colour = lighter(COLOURS.get(part.kind, MESSAGE), stages.index(part.stage) / len(stages))
                drawn.append(Box(rank, start, end, top, height, colour, label, title))
    return drawn


def kinds(*timelines: Timeline) -> list[str]:
    """Return the kinds of actions that occur and have a colour, for a legend."""
    spans = (span for timeline in timelines for rank in timeline.spans for span in rank)
    occur = {part.kind for span in spans for part in span.action.parts}
    return [kind for kind in COLOURS if kind in occur]


def lighter(colour: str, amount: float) -> str:
    """Lighten a colour like #1fb58a by an amount from 0 (unchanged) to 1 (white)."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * amount):02x}" for channel in channels)


def as_svg(timeline: Timeline, duration: float | None = None, width: int = 960, with_legend: bool = True) -> str:
    """Draw a timeline as SVG: a legend, a row for each rank with the curve of its activations below, and a time axis.
    Hovering over an action shows its name and times. Text is 14 px high where GitHub shows the picture 830 px wide.

    Args:
        duration: time that the width stands for, to compare timelines; by default the step's time.
        width: width in pixels.
    """
    scale = (width - LEFT - 12) / (duration or timeline.step_time)
    curves = memory_curves(timeline)
    peak = max(live for curve in curves for _, live in curve)
    keys, first = legend(0, 0, timeline, width=width) if with_legend else ([], 0)
    if with_legend and peak:
        text = f"Curves: activations, up to {peak:.4g} {timeline.memory_unit}. The number below a rank is its peak."
        keys.append(f'<text x="0" y="{first + 15}">{text}</text>')
        first += LINE
    each = ROW + CURVE + GAP
    bottom = first + len(timeline.spans) * each
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + LINE}" width="{width}" '
        f'height="{bottom + LINE}">',
        f"<style>{STYLE}{OWN_STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        *keys,
        *time_axis(LEFT, bottom - 4, scale, duration or timeline.step_time),
    ]
    for rank, curve in enumerate(curves):
        top = first + rank * each
        lines.append(f'<text x="0" y="{top + 18}">pp {rank}</text>')
        lines.append(_rect("idle", LEFT, top, timeline.step_time * scale, ROW) + "/>")
        lines += memory(curve, peak, timeline.step_time, top + ROW + CURVE, scale) if peak else []
    for box in boxes(timeline):
        x, y = LEFT + box.start * scale, first + box.rank * each + box.top * ROW
        w, h = (box.end - box.start) * scale, box.height * ROW
        lines.append(f'{_rect("action", x, y, w, h)} fill="{box.colour}"><title>{escape(box.title)}</title></rect>')
        if w > CHARACTER * len(box.label) > 0 and h > LINE / 2:
            lines.append(f'<text class="label" x="{x + w / 2:.2f}" y="{y + h / 2 + 6:.2f}">{box.label}</text>')
    return "\n".join([*lines, "</svg>"])


def memory(
    curve: Sequence[tuple[float, float]], peak: float, step_time: float, bottom: float, scale: float
) -> list[str]:
    """Draw a curve of activations as an area, and its maximum as a number. A height of CURVE is `peak`."""
    points, height = [(float(LEFT), bottom)], 0.0
    for time, live in [*curve, (step_time, 0.0)]:
        x, before, height = LEFT + time * scale, height, live / peak * CURVE
        points += [(x, bottom - before), (x, bottom - height)]
    text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    most = max(live for _, live in curve)
    return [
        f'<polygon class="memory" points="{text}"><title>activations, at most {most:.4g}</title></polygon>',
        f'<text x="0" y="{bottom - 3:.2f}">{most:.4g}</text>',
    ]


def time_axis(x: float, y: float, scale: float, duration: float) -> list[str]:
    """Draw an axis with at most a dozen numbers."""
    lines = [f'<line class="axis" x1="{x:.2f}" y1="{y:.2f}" x2="{x + duration * scale:.2f}" y2="{y:.2f}"/>']
    distance = tick_distance(duration, most=12)
    for number in range(math.floor(duration / distance + 1e-9) + 1):
        at = x + number * distance * scale
        lines.append(f'<line class="axis" x1="{at:.2f}" y1="{y:.2f}" x2="{at:.2f}" y2="{y + 5:.2f}"/>')
        lines.append(f'<text class="centred" x="{at:.2f}" y="{y + 21:.2f}">{number * distance:g}</text>')
    return lines


def legend(x: float, y: float, *timelines: Timeline, width: float = 960) -> tuple[list[str], float]:
    """Draw the colours of the actions that occur, and of idle time, in as many lines as needed. Also returns where the
    last line ends.
    """
    lines, left = [], x
    for kind in [*kinds(*timelines), "idle"]:
        name = kind if kind == "idle" else MEANING[kind] if kind in "FB" else f"{kind}: {MEANING[kind]}"
        colour = "" if kind == "idle" else f' fill="{COLOURS[kind]}"'
        if x + 25 + CHARACTER * len(name) > width:
            x, y = left, y + LINE
        lines.append(f"{_rect('idle' if kind == 'idle' else 'key', x, y, 18, 18)}{colour}/>")
        lines.append(f'<text x="{x + 25:.2f}" y="{y + 15:.2f}">{escape(name)}</text>')
        x += 25 + CHARACTER * len(name) + 12
    return lines, y + LINE


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width"/>
<title>{title}</title>
<style>{style}
body {{ font-size: 15px; line-height: 1.5; margin: 2em; max-width: 960px }}
h2 {{ font-size: 1em; margin: 2em 0 0.5em }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; padding: 0.1em 1.5em 0.1em 0; border-bottom: 1px solid #8888 }}
.key {{ display: inline-block; color: #000; padding: 0 0.5em; margin-right: 1em }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{legend}</p>
<p>The number in a box is its micro-batch. A lighter colour is a later chunk, and grey is idle time. Two half boxes are
a forward and a backward that overlap; low boxes are messages and reductions. The curve below a rank shows its
activations, and the number beside it their peak, in units of one micro-batch in all stages of a pp rank. The unit of simulated times is the forward of one micro-batch through all of these stages;
measured times are in seconds. Hover over a box to see its action, stage first: 2F0 is the forward of micro-batch 0
through stage 2.</p>
<table>
{table}
</table>
{pictures}
</body>
</html>
"""


def as_page(title: str, timelines: Mapping[str, Timeline]) -> str:
    """Draw named timelines on one time axis, as a self-contained HTML page."""
    keys = kinds(*timelines.values())
    legend = [f'<span class="key" style="background: {COLOURS[key]}">{key} {MEANING[key]}</span>' for key in keys]
    rows = [["", *summary(next(iter(timelines.values())))]]
    rows += [[name, *summary(timeline).values()] for name, timeline in timelines.items()]
    duration = max(timeline.step_time for timeline in timelines.values())
    pictures = [
        f"<h2>{escape(name)}</h2>\n{as_svg(each, duration, with_legend=False)}" for name, each in timelines.items()
    ]
    return PAGE.format(
        title=escape(title),
        style=STYLE,
        legend="\n".join(legend),
        table="\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        pictures="\n".join(pictures),
    )
