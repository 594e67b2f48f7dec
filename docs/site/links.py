"""The check of all links within the website."""

import html
import re
from pathlib import Path
from urllib.parse import unquote

from picotron.console import UserError


def attributes(page: Path, names: str) -> list[str]:
    """Return the values of attributes of a page, such as `href|src`. This package writes its HTML."""
    return [html.unescape(value) for value in re.findall(rf' (?:{names})="([^"]*)"', page.read_text())]


def check_links(out: Path) -> int:
    """Check all links within the site, and return how many there are.

    Raises:
        UserError: a link leads to no file or to no anchor, or two anchors of a page are the same.
    """
    anchors = {path.resolve(): attributes(path, "id") for path in out.rglob("*.html")}
    wrong = [f"{path.name}: two elements have one id" for path, ids in anchors.items() if len(ids) > len(set(ids))]
    links = [(path, link) for path in anchors for link in attributes(path, "href|src") if not re.match("[a-z]+:", link)]
    for path, link in links:
        name, _, anchor = unquote(link).partition("#")
        target = (path.parent / name).resolve() if name else path
        target = target / "index.html" if target.is_dir() else target
        is_there = target.is_file() and (not anchor or target.parent.name == "playground" or anchor in anchors[target])
        wrong += [] if is_there else [f"{path.relative_to(out.resolve())}: {link}"]
    if wrong:
        raise UserError("links that lead nowhere:\n" + "\n".join(wrong))
    return len(links)
