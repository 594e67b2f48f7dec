"""docs/pictures/*.svg are legible, and the simulated clock of buckets.svg keeps the order of things."""

import itertools
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.programs.quickstart import quickstart, stage_of
from docs.programs.svg import RANKS, RUNS, TENSORS
from docs.programs.time_pictures import Part, backward_and_reductions
from picotron import process_group_manager as pgm
from picotron.command_line import load_config
from picotron.config import Distributed
from picotron.data_parallel.data_parallel import make_buckets
from picotron.drawing.draw_svg import COLOURS
from picotron.explain.fake_group import fake_rank

README_WIDTH, MINIMUM = 830, 14  # pixels
PICTURES = sorted(Path("docs/pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
each_picture = pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)


def box_and_texts(path: Path) -> tuple[list[float], list[ElementTree.Element]]:
    root = ElementTree.parse(path).getroot()
    return [float(number) for number in root.attrib["viewBox"].split()], [
        text for text in root.iter(f"{SVG}text") if text.text
    ]


@each_picture
def test_labels_are_legible_at_the_width_of_a_readme(path: Path) -> None:
    (_, _, width, _), texts = box_and_texts(path)
    style = "".join(ElementTree.parse(path).getroot().itertext())
    rules = [float(size) for size in re.findall(r"^text \{ font-size: ([\d.]+)px \}", style, re.MULTILINE)]
    assert len(re.findall("font-size", style)) == len(rules), "only the rule for all texts sets a size"
    assert texts
    assert not [text.text for text in texts if "font-size" in text.attrib or "style" in text.attrib]
    assert rules[-1] * README_WIDTH / width >= MINIMUM  # the last rule applies


@each_picture
def test_labels_are_inside_of_the_picture(path: Path) -> None:
    (first, top, width, height), texts = box_and_texts(path)
    right, bottom = first + width, top + height
    for text in texts:
        size = 8.8 * len(text.text or "")  # a character's mean width is 8.4 to 9.2 pixels, depending on the font
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        left = x - size / 2 if text.get("class") in ("label", "centred") else x
        assert left >= first, text.text
        assert left + size <= right, text.text
        assert top + 12 <= y <= bottom - 2, text.text


@each_picture
def test_page_is_as_large_as_the_picture_and_dark_in_dark_mode(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    page = next(root.iter(f"{SVG}rect")).attrib  # the first shape, below all others
    assert page["class"] == "page"
    box = [page.get(key) for key in ("x", "y", "width", "height")]
    assert box == root.attrib["viewBox"].split() or (
        box == [None, None, "100%", "100%"] and root.attrib["viewBox"][:4] == "0 0 "
    )
    rules = re.search(r"prefers-color-scheme: dark\) \{(.*?)\n\}", "".join(root.itertext()), re.DOTALL)
    assert rules is not None
    assert re.search(r"\.page \{ fill: #1c1c1c \}", rules[1])
    assert re.search(r"text, body \{ fill: #ddd", rules[1])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("overview", load_config(["--config", "template/base_config.json"]).distributed),
        ("axes", quickstart(dp_size=2, pp_size=2, cp_size=2, tp_size=2).distributed),
    ],
)
def test_arrows_join_the_ranks_of_a_group(name: str, layout: Distributed) -> None:
    """Both ends of an arrow touch the boxes of neighbours in the group of the axis that its title names. Each pair of
    neighbours has an arrow.
    """
    boxes, arrows = list[tuple[int, list[float]]](), list[tuple[int, str, list[int], list[list[float]]]]()
    for shape in ElementTree.parse(f"docs/pictures/{name}.svg").getroot().iter():
        title = shape.findtext(f"{SVG}title", "")
        if found := re.match(r"rank (\d+):", title):
            boxes.append((int(found[1]), [float(shape.attrib[key]) for key in ("x", "y", "width", "height")]))
        elif found := re.match(r"(\w\w): ranks (\d+) and (\d+)$", title):
            points = [[float(number) for number in point.split(",")] for point in shape.attrib["points"].split()]
            first = (len(boxes) - 1) // layout.world_size * layout.world_size  # the first box of this panel
            arrows.append((first, found[1], [int(found[2]), int(found[3])], points))
    for first, _, ranks, points in arrows:
        panel = boxes[first : first + layout.world_size]
        assert [rank_at(points[0], panel), rank_at(points[-1], panel)] == ranks
    expected = []
    for rank in range(layout.world_size):
        with fake_rank(rank, layout):
            grid = pgm.process_group_manager
            groups = {
                "dp": grid.dp_group_ids,
                "pp": grid.pp_group_ids,
                "cp": grid.cp_group_ids,
                "tp": grid.tp_group_ids,
            }
        expected += [(axis, [rank, ids[ids.index(rank) + 1]]) for axis, ids in groups.items() if rank != ids[-1]]
    assert sorted((axis, ranks) for _, axis, ranks, _ in arrows) == sorted(expected)


def rank_at(point: list[float], boxes: list[tuple[int, list[float]]]) -> int:
    """Return the rank whose box is at most 4 pixels away from a point."""
    x, y = point
    near = [
        rank
        for rank, (left, top, width, height) in boxes
        if -4 <= x - left <= width + 4 and -4 <= y - top <= height + 4
    ]
    assert len(near) == 1, near
    return near[0]


def test_palettes_of_different_meanings_share_no_colour() -> None:
    palettes = [RANKS, [*TENSORS.values()], [*COLOURS.values()], RUNS]
    assert len(set().union(*palettes)) == sum(map(len, palettes))


@pytest.mark.parametrize("page", ["#ffffff", "#1c1c1c"])
def test_lines_contrast_with_light_and_dark_pages(page: str) -> None:
    """WCAG 2.1 asks for a contrast of 3 between graphics and what is beside them."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in RUNS:
        darker, lighter = sorted(luminance(each) for each in (colour, page))
        assert (lighter + 0.05) / (darker + 0.05) > 3, colour


def test_animation_stops_if_the_reader_asks_for_less_motion() -> None:
    style = "".join(ElementTree.parse("docs/pictures/1f1b_animated.svg").getroot().itertext())
    moving = re.search(r"@media \(prefers-reduced-motion: no-preference\) \{(.*?)\n\}", style, re.DOTALL)
    assert moving is not None
    assert moving[1].count("animation:") == style.count("animation:") == 2
    assert re.search(r"\.cover \{[^}]*visibility: hidden", style)


def test_reductions_wait_for_their_bucket_and_for_each_other() -> None:
    with fake_rank(0, quickstart(dp_size=2).distributed):
        parameters = list(stage_of(quickstart(dp_size=2)).parameters())[::-1]
        parts = [Part(parameter, 1e-3, None, "") for parameter in parameters]
        group = pgm.process_group_manager.cp_dp_group
        for megabytes in (0.0, 0.7, 25.0):
            buckets = make_buckets(parameters, group, megabytes)
            works = backward_and_reductions(parts, buckets, 2, waits=False)
            reductions = [work for work in works if work.row == 1]
            assert [work.label for work in reductions] == [str(i) for i in range(len(buckets))]
            filled, free = 0, 0.0
            for bucket, work in zip(buckets, reductions, strict=True):
                filled += len(bucket.parameters)
                assert work.start == pytest.approx(max(filled * 1e-3, free))
                free = work.end
        alternating = backward_and_reductions(parts, make_buckets(parameters, group, 0.0), 2, waits=True)
        assert all(math.isclose(a.end, b.start) for a, b in itertools.pairwise(alternating))
