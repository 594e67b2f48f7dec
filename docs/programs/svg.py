"""Pictures for the pages: diagrams, and rows of spans on a time axis.

A colour means the same in all pictures: `COLOURS` of `workbench.drawing.draw_svg` are actions, `RANKS` ranks, `TENSORS`
kinds of tensors, `RUNS` runs and other lines.
"""

import argparse
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.drawing.draw_svg import LINE, WIDTH, Svg

RANKS = ["#8a82dc", "#c58fdb", "#eda5c6", "#fbcdb9", "#fdf0cf"]  # darker first, so that they differ in grey, too
TENSORS = {  # those that stay between steps are green, the others brown (ColorBrewer's BrBG)
    "weights": "#4aa59d",
    "gradients": "#8fd3c8",
    "optimizer": "#bbe2dc",
    "activations": "#d3a95a",
    "temporary": "#f3e2b6",
}
RUNS = ["#2a8fd0", "#d9662b", "#1c9c78", "#b0559a", "#8d8420"]  # of lines and dots: legible on white and on black
GREY = "#888888"  # of text and axes in plots: likewise
PLOTS: dict[Any, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY) | {
    "font.size": 13, "legend.fontsize": 11, "legend.frameon": False, "axes.grid": True, "grid.alpha": 0.3, "svg.fonttype": "none", "svg.hashsalt": "picotron",
}  # fmt: skip


def plots(rows: int, columns: int, height: float, draw: Callable[..., None]) -> str:
    """Draw diagrams with matplotlib.

    Args:
        height: of the picture, as a fraction of its width.
        draw: function of the diagrams' axes, row by row, which draws them.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(PLOTS):
        figure = Figure((9.6, 9.6 * height), layout="constrained")
        draw(*figure.subplots(rows, columns, squeeze=False, sharex="all", sharey="row").flat)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


class Span(NamedTuple):
    """A box of a row, in milliseconds."""

    row: str
    start: float
    end: float
    colour: str
    label: str = ""
    title: str = ""


def spans(
    panels: dict[str, list[Span]],
    rows: Sequence[str],
    unit: str,
    left: float = 110,
    keys: Sequence[tuple[str, str]] = (),
) -> str:
    """Draw rows of spans on one time axis, a panel for each title.

    Args:
        rows: the rows of each panel.
        unit: what the numbers of the axis are.
        left: width of the names of rows.
        keys: colours with their names.
    """
    row, each = 30, 34
    longest = max(span.end for panel in panels.values() for span in panel)
    scale, top, height = (WIDTH - left - 10) / longest, (LINE + 12) * bool(keys), 2 * LINE + each * len(rows)
    picture = Svg(WIDTH, top + height * len(panels) + LINE + 12)
    picture.keys(left, 0, *keys)
    for number, (title, panel) in enumerate(panels.items()):
        y, end = top + number * height, max(span.end for span in panel)
        picture.text(0, y + 16, f"{title}: {end:.3g} ms", "title")
        for i, name in enumerate(rows):
            picture.text(0, y + LINE + i * each + 25, name)
            picture.frame(left, y + LINE + i * each + 5, end * scale, row)
        for span in panel:
            x, width = left + span.start * scale, max(1.5, (span.end - span.start) * scale)
            title = span.title or f"{span.end - span.start:.1f} ms"
            picture.box(x, y + LINE + rows.index(span.row) * each + 5, width, row, span.colour, span.label, title)
    picture.time_axis(left, top + height * len(panels) - 10, scale, longest, unit)
    return str(picture)


class Part(NamedTuple):
    """Rows (dimension 0) or columns (1) of a matrix, from `start` to `stop`."""

    dim: int
    start: int
    stop: int
    colour: str
    label: str
    title: str


def matrices(shapes: Mapping[str, Sequence[int]], parts: Mapping[str, Sequence[Part]], note: str) -> str:
    """Draw matrices and parts of them, all on one scale. Equal parts of a matrix share their band."""
    gap, top, x = 40, 3 * LINE, 0.0
    across = (WIDTH - gap * (len(shapes) - 1)) / sum(columns for _, columns in shapes.values())
    down = max(across, 1.05)  # pixels of a row, so that labels fit
    bottom = top + down * max(rows for rows, _ in shapes.values())
    picture = Svg(WIDTH, bottom + 1.5 * LINE)
    for name, (rows, columns) in shapes.items():
        axis = "".join("by columns" if part.dim else "by rows" for part in parts[name][:1])
        for i, line in enumerate((name, f"{rows} x {columns}", axis)):
            picture.text(x, 14 + 20 * i, line, "" if i else "title")
        width, height = columns * across, rows * down
        picture.frame(x, top, width, height)
        for part in parts[name]:
            equal = [each.label for each in parts[name] if each[:3] == part[:3]]
            band, size = equal.index(part.label) / len(equal), max(0, part.stop - part.start)
            if part.dim == 0:
                place = x + band * width, top + part.start * down, width / len(equal), size * down
            else:
                place = x + part.start * across, top + band * height, size * across, height / len(equal)
            picture.box(*place, part.colour, part.label, part.title)
        x += width + gap
    picture.text(0, bottom + LINE, note)
    return str(picture)


def colour_of(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


def causal(picture: Svg, x: float, y: float, size: float, owners: Sequence[int]) -> None:
    """Add the blocks of causal attention, in the colours of the ranks that own the queries, with the names of these
    ranks on the left.
    """
    for query, rank in enumerate(owners):
        top = y + query * size
        picture.text(x - 76, top + size / 2 + 6, f"rank {rank}")
        for key in range(query):
            picture.box(x + key * size, top, size, size, colour_of(rank))
        picture.triangle(x + query * size, top, size, colour_of(rank))


def main(description: str | None, *pictures: Callable[..., str]) -> None:
    """Run a program that draws one of these pictures, chosen by its name, from files that it names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=(by_name := {picture.__name__: picture for picture in pictures}))
    parser.add_argument("files", nargs="*", type=Path, help="files or folders that the picture shows")
    parser.add_argument("--out", type=Path, required=True, help="the .svg file to write")
    options = parser.parse_args()
    options.out.write_text(by_name[options.picture](*options.files), encoding="utf-8")
