"""docs/pictures/*.svg are legible, and the simulated clock of buckets.svg keeps the order of things."""

import itertools
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.programs.quickstart import quickstart, stage_of
from docs.programs.time_pictures import Part, backward_and_reductions
from picotron import process_group_manager as pgm
from picotron.data_parallel.data_parallel import make_buckets
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
    (_, _, width, height), texts = box_and_texts(path)
    for text in texts:
        size = 8.8 * len(text.text or "")  # a character's mean width is 8.4 to 9.2 pixels, depending on the font
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        left = x - size / 2 if text.attrib["class"] in ("label", "centred") else x
        assert left >= -3, text.text
        assert left + size <= width + 6, text.text
        assert 12 <= y <= height - 2, text.text


def test_reductions_wait_for_their_bucket_and_for_each_other() -> None:
    with fake_rank(0, quickstart(dp_size=2).distributed):
        parameters = list(stage_of(quickstart(dp_size=2)).parameters())[::-1]
        parts = [Part(parameter, 1e-3, "", "") for parameter in parameters]
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
