"""The check of all links within the website."""

import html
import re
from pathlib import Path
from urllib.parse import unquote

from picotron.console import UserError


def links_of(page: Path) -> list[str]:
    """Return the links of a page, of which this package writes the HTML."""
    return [html.unescape(link) for link in re.findall(r' (?:href|src)="([^"]*)"', page.read_text())]


def anchors_of(page: Path) -> list[str]:
    return re.findall(r' id="([^"]*)"', page.read_text())


def check_links(out: Path) -> int:
    """Check all links within the site, and return how many there are.

    Raises:
        UserError: a link leads to no file or to no anchor, or two anchors of a page are the same.
    """
    anchors = {path.resolve(): anchors_of(path) for path in out.rglob("*.html")}
    wrong, count = [], 0
    for path, names in anchors.items():
        wrong += [f"{path.name}: two elements are #{name}" for name in set(names) if names.count(name) > 1]
        for link in links_of(path):
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            is_setting = target.parent.name == "playground"
            if not target.is_file() or (anchor and not is_setting and anchor not in anchors[target]):
                wrong.append(f"{path.relative_to(out.resolve())}: {link}")
    if wrong:
        raise UserError("links that lead nowhere:\n" + "\n".join(wrong))
    return count
