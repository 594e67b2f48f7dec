"""The check of all links within the website."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from picotron.console import UserError


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src"):
                self.links.append(value or "")
            elif name == "id":
                self.anchors.append(value or "")


def check_links(out: Path) -> int:
    """Check all links within the site, and return how many there are.

    Raises:
        UserError: a link leads to no file or to no anchor, or two anchors of a page are the same.
    """
    pages = {path.resolve(): Links(path.read_text()) for path in out.rglob("*.html")}
    wrong, count = [], 0
    for path, page in pages.items():
        wrong += [
            f"{path.name}: two elements are #{name}" for name in set(page.anchors) if page.anchors.count(name) > 1
        ]
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            is_setting = target.parent.name == "playground"
            if not target.is_file() or (anchor and not is_setting and anchor not in pages[target].anchors):
                wrong.append(f"{path.relative_to(out.resolve())}: {link}")
    if wrong:
        raise UserError("links that lead nowhere:\n" + "\n".join(wrong))
    return count
