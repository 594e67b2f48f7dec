"""SVG pictures and HTML pages show the simulated timeline: boxes, memory curves, time axes and legends."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from picotron.drawing.draw_svg import COLOURS, CURVE, LEFT, LINE, as_page, as_svg, boxes, legend, lighter
from picotron.schedules.actions import Action
from picotron.schedules.schedules import SCHEDULES, forward_only
from picotron.schedules.simulate import Span, Timeline, peak_activations, simulate
from tests.drawing.test_draw import timeline_of

SVG = "{http://www.w3.org/2000/svg}"


def parts_of(timeline: Timeline) -> int:
    return sum(len(span.action.parts) for spans in timeline.spans for span in spans)


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_rectangle_for_every_action(name: str) -> None:
    timeline = timeline_of(name)
    root = ElementTree.fromstring(as_svg(timeline, width=1000))
    rectangles = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "action"]
    assert len(rectangles) == parts_of(timeline) == 2 * 5 * 3 * SCHEDULES[name].chunks + splits(timeline)
    scale = (1000 - LEFT - 12) / timeline.step_time
    expected = [
        (f"{action}, pp rank {rank}, {start:.6g} to {end:.6g}", LEFT + start * scale, (end - start) * scale)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
        for _ in action.parts
    ]
    for rectangle, (title, x, width) in zip(rectangles, expected, strict=True):
        assert rectangle.findtext(f"{SVG}title") == title
        assert float(rectangle.get("x", "")) == pytest.approx(x, abs=0.01)
        assert float(rectangle.get("width", "")) == pytest.approx(width, abs=0.01)


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_memory_curve_a_time_axis_and_a_legend(name: str) -> None:
    timeline = timeline_of(name)
    root = ElementTree.fromstring(as_svg(timeline))
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if text in ("forward", "idle")] == ["forward", "idle"]
    peaks = [peak_activations(program) / SCHEDULES[name].chunks for program in timeline.programs]
    assert [texts[texts.index(f"pp {rank}") + 1] for rank in range(3)] == [f"{peak:.3g}" for peak in peaks]
    scale = (960 - LEFT - 12) / timeline.step_time
    for peak, polygon in zip(peaks, root.iter(f"{SVG}polygon"), strict=True):
        points = [tuple(map(float, point.split(","))) for point in polygon.get("points", "").split()]
        assert points[0][1] - min(y for _, y in points) == pytest.approx(CURVE * peak / max(peaks), abs=0.02)
        assert points[0][1] == max(y for _, y in points) == points[-1][1]
        assert (points[0][0], points[-1][0]) == (LEFT, pytest.approx(LEFT + scale * timeline.step_time, abs=0.02))
    numbers = [t for t in root.iter(f"{SVG}text") if t.get("class") == "centred"]
    assert [n.text for n in numbers][:2] == ["0", "2" if timeline.step_time < 24 else "5"]
    for number in numbers:
        assert float(number.get("x", "")) == pytest.approx(LEFT + scale * float(number.text or ""), abs=0.02)


def test_text_in_svg_is_14_pixels_high_at_the_width_of_a_readme() -> None:
    *_, last = re.findall(r"text \{ font-size: (\d+)px \}", as_svg(timeline_of("1f1b")))
    assert float(last) * 830 / 960 >= 14


def test_legend_continues_in_another_line() -> None:
    spans = [Span(Action(kind, 0), float(i), i + 1.0) for i, kind in enumerate("FBIWR")]
    lines, bottom = legend(0, 0, Timeline([spans]))
    assert bottom == 2 * LINE
    xs = [float(re.findall(r' x="([0-9.]+)"', line)[0]) for line in lines]
    assert max(xs) < 960
    assert legend(0, 0, timeline_of("1f1b"))[1] == LINE


def splits(timeline: Timeline) -> int:
    return sum(part.kind == "W" for spans in timeline.spans for span in spans for part in span.action.parts)


def test_boxes_of_a_rank_do_not_overlap() -> None:
    timeline = timeline_of("dualpipev", 3, 8)
    for one, other in itertools.combinations(boxes(timeline), 2):
        same_time = min(one.end, other.end) - max(one.start, other.start) > 1e-9
        same_place = min(one.top + one.height, other.top + other.height) - max(one.top, other.top) > 1e-9
        assert not (one.rank == other.rank and same_time and same_place)


def test_colour_shows_kind_and_chunk() -> None:
    """A later chunk is lighter. Messages are low and have no label."""
    timeline = simulate(forward_only(1, 1, chunks=2))
    assert [box.colour for box in boxes(timeline)] == [COLOURS["F"], lighter(COLOURS["F"], 0.5)]
    assert (lighter("#102030", 0), lighter("#102030", 1)) == ("#102030", "#ffffff")
    message = boxes(Timeline([[Span(Action("SEND_F", 0), 0.0, 1.0)]]))[0]
    assert (message.top, message.height, message.label) == (0.75, 0.25, "")


def test_page_has_pictures_on_one_time_axis_and_a_summary() -> None:
    """The page is valid XML with a legend, and loads nothing from elsewhere."""
    timelines = {f"{name} <&>": timeline_of(name) for name in SCHEDULES}
    page = as_page("All & everything", timelines)
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert [h.text for h in root.iter("h2")] == list(timelines)
    pictures = list(root.iter(f"{SVG}svg"))
    longest = max(timeline.step_time for timeline in timelines.values())
    for picture, timeline in zip(pictures, timelines.values(), strict=True):
        found = [r for r in picture.iter(f"{SVG}rect") if r.get("class") == "action"]
        assert len(found) == parts_of(timeline)
        ends = [float(r.get("x", "")) + float(r.get("width", "")) for r in found]
        assert max(ends) == pytest.approx(LEFT + (960 - LEFT - 12) * timeline.step_time / longest, abs=0.02)
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert rows[0] == [None, "step time", "bubble", "peak activations by pp rank"]
    assert rows[2] == ["1f1b <&>", "21", "28.6%", "3 2 1"]
    legend = [span.text for span in root.iter("span")]
    assert legend == ["F forward", "B backward", "I backward for the input", "W backward for the weights"]
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=|url\(|<script|@import", page)
    assert len(page) < 300_000
