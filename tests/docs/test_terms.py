"""docs/terms.md: one letter for each meaning, on all pages and in docstrings."""

import re
from pathlib import Path

import pytest


def symbols() -> list[tuple[str, str]]:
    """Return (letter, meaning) of each row of the table of symbols."""
    table = Path("docs/terms.md").read_text().partition("## Symbols")[2]
    rows = re.findall(r"^\| ([\w, ]+) \| ([^|]*?)(?:[:,(][^|]*)? \|", table, re.MULTILINE)
    return [(letter, meaning.strip()) for letter, meaning in rows if letter != "symbol"]


def test_each_letter_has_one_meaning_and_each_meaning_one_letter() -> None:
    letters, meanings = zip(*symbols(), strict=True)
    assert len(set(letters)) == len(letters)
    assert len(set(meanings)) == len(meanings)
    assert set("BTDHKdFVLpmv") <= set(letters)


PAGES = [
    path
    for folder in ("docs", "docs/reference")
    for path in sorted(Path(folder).glob("*.md"))
    if path.name != "terms.md"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_begins_with_a_link_to_the_terms(page: Path) -> None:
    link = "../terms.md" if page.parent.name == "reference" else "terms.md"
    assert re.match(rf"# .*\n\nTerms and symbols: \[terms\.md\]\({re.escape(link)}\)\.", page.read_text())


def test_pages_and_docstrings_use_the_letters_of_the_table() -> None:
    """Where a letter stands directly before or after its meaning, as in `hidden size D`, it is that of the table."""
    files = [*PAGES, Path("README.md"), *(p for folder in ("picotron", "docs") for p in Path(folder).rglob("*.py"))]
    found = 0
    for letter, meaning in symbols():
        pattern = rf"(?:\b([B-Zb-wyz]) )?\b{re.escape(meaning)}\b(?: ([B-Zb-wyz])\b)?"  # x is a product
        for file in files:
            for before, after in re.findall(pattern, file.read_text()):
                used = {before, after} - {""}
                assert used <= {letter}, f"{file}: {before} {meaning} {after}"
                found += bool(used)
    assert found >= 10
