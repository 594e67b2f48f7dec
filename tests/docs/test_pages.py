"""Pages about one idea: short enough to read in one sitting, with a question, the code, a picture and an exercise."""

import re
from pathlib import Path

import pytest

PARALLELISMS = ["data_parallel", "tensor_parallel", "context_parallel", "pipeline_parallel", "zero"]
PAGES = [*PARALLELISMS, "pipeline_schedules", "collectives", "training_step"]


def read(page: str) -> str:
    return Path(f"docs/{page}.md").read_text()


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a page, without tables, blocks of code, headings and comments."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:[#|<!].*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # a link counts as its text
    return re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)


def test_paragraphs_are_split_at_empty_lines_and_list_items() -> None:
    text = "# A b\n\none\ntwo\n- three\n  four\n\n```text\nfive\n```\n| six |\n\n1. [seven](a b.md)\n"
    assert [part.split() for part in paragraphs(text) if part.split()] == [
        ["one", "two"],
        ["-", "three", "four"],
        ["1.", "[seven]"],
    ]


@pytest.mark.parametrize("page", sorted(path.stem for path in Path("docs").glob("*.md")))
def test_paragraphs_are_short(page: str) -> None:
    assert [part for part in paragraphs(read(page)) if len(part.split()) > 80] == []


@pytest.mark.parametrize("page", PAGES)
def test_page_opens_with_a_question_and_has_a_picture_and_an_exercise(page: str) -> None:
    text = read(page)
    opening = text.partition("\n## ")[0]
    assert re.search(r"\?\s", opening)
    assert re.search(r"\d", opening)
    assert re.search(r"^!\[", text, re.MULTILINE)
    assert re.search(r"^## Exercises\n\n(?:.*\n)*?(?:- \[Puzzle|1\. )", text, re.MULTILINE)


@pytest.mark.parametrize("page", [*PARALLELISMS, "collectives", "training_step"])
def test_page_shows_the_code_of_its_idea(page: str) -> None:
    assert "<!-- code: " in read(page)
