"""Pages of the website: the repository's Markdown as HTML, with what GitHub's view of the same files lacks."""

import dataclasses
import html
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from picotron.console import UserError

ROOT = Path(__file__).resolve().parents[2]
PICTURES = "docs/pictures"


@dataclasses.dataclass(frozen=True)
class Checkout:
    """The commit that the site shows.

    Args:
        repository: its web address, or a folder.
        commit: the full hash.
    """

    repository: str
    commit: str

    @property
    def on_web(self) -> bool:
        return self.repository.startswith("https://")

    def link(self, path: str, line: int = 0) -> str:
        """Return the address of a file or folder of the commit, and of a line of it."""
        if not self.on_web:
            return (ROOT / path).as_uri()
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{self.repository}/{kind}/{self.commit}/{path}" + (f"#L{line}" if line else "")


def address(page: str) -> str:
    """Return the place of a page in the site: docs/zero.md -> docs/zero.html, steps/README.md -> steps/index.html."""
    if page == "README.md":
        return "readme.html"  # index.html is the landing page
    path = PurePosixPath(page)
    return str(path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))


def relative(target: str, here: str) -> str:
    """Return a link from a page of the site to another file of it, which works in any folder of a server."""
    return os.path.relpath(target, PurePosixPath(here).parent).replace(os.sep, "/")


def coloured(text: str, language: str) -> str:
    lexer = get_lexer_by_name(language if language in ("python", "bash", "json") else "text", stripnl=False)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).removesuffix("\n")


def difference(text: str) -> str:
    """Mark the new and the old lines of a difference, in HTML."""
    text = re.sub(r"^\+.*", r'<span class="new">\g<0></span>', text, flags=re.MULTILINE)
    return re.sub(r"^-.*", r'<span class="old">\g<0></span>', text, flags=re.MULTILINE)


def block(text: str, language: str) -> str:
    """Return a block of code. In a console, the command is an element of its own, which the copy button takes."""
    session = re.fullmatch(r"\$ ((?:.*\\\n)*.*)\n?((?:.*\n?)*)", text.removesuffix("\n"))
    if language == "console" and session:
        output = html.escape(session[2])
        if session[1].startswith("python -m steps "):  # prints a difference
            output = difference(output)
        code = f'<span class="command">{coloured(session[1], "bash")}</span>\n{output}'
    elif language == "diff":
        code = difference(html.escape(text))
    else:
        code = coloured(text, language)
    return f'<div class="block {language}"><pre tabindex="0"><code>{code}</code></pre></div>\n'


def line_of(path: Path, symbol: str) -> int:
    """Return the number of the line that defines a function or a class such as `Bucket.launch`, or 0."""
    text, position = path.read_text(), 0
    for name in symbol.split("."):
        found = re.compile(rf"^ *(?:def|class) {re.escape(name)}\b", re.MULTILINE).search(text, position)
        if not found:
            return 0
        position = found.end()
    return text.count("\n", 0, position) + 1


class Page:
    """A page of the site.

    Args:
        path: the Markdown file, relative to the repository.
        pages: the files of all pages; links to other files lead to the checkout.
        buttons: HTML to show below headings, by their text.
    """

    def __init__(self, path: str, pages: Sequence[str], checkout: Checkout, buttons: dict[str, str]) -> None:
        self.path, self.pages, self.checkout = path, pages, checkout
        self.address = address(path)
        self.parts: list[tuple[int, str, str, list[str]]] = []  # level, heading, anchor, and texts below it
        markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        markdown.add_render_rule("fence", lambda _, all, i, *__: block(all[i].content, all[i].info))
        markdown.add_render_rule("table_open", lambda *_: '<div class="table" tabindex="0"><table>')
        markdown.add_render_rule("table_close", lambda *_: "</table></div>")
        tokens = markdown.parse((ROOT / path).read_text())
        for before, token in itertools.pairwise([Token("", "", 0), *tokens]):
            if token.type == "html_block":
                token.content = re.sub(r"<!--.*?-->\n?", "", token.content, flags=re.DOTALL)
            elif before.type == "heading_open" and token.type == "inline":
                self.add_heading(before, token, buttons)
            elif token.content and self.parts:
                self.parts[-1][3].append(plain(token) if token.children else token.content)
            self.change_links(token.children or [])
        self.title = self.parts[0][1]
        self.html = markdown.renderer.render(tokens, markdown.options, {})

    def add_heading(self, opening: Token, token: Token, buttons: dict[str, str]) -> None:
        """Give a heading the anchor that GitHub gives it, and its button."""
        text = plain(token)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        if earlier := sum(text == part[1] for part in self.parts):
            anchor += f"-{earlier}"
        self.parts.append((int(opening.tag[1:]), text, anchor, []))
        opening.attrs["id"] = anchor
        link = f' <a class="anchor" href="#{anchor}" aria-label="Link to this section">#</a>'
        link += buttons.get(text, "").format(root=os.path.relpath(".", Path(self.address).parent))
        if opening.tag != "h1":
            token.children = [*(token.children or []), Token("html_inline", "", 0, content=link)]

    def change_links(self, tokens: Sequence[Token]) -> None:
        for token, inner in itertools.pairwise(tokens):
            if token.type == "link_open":
                symbol = inner.content if inner.type == "code_inline" else ""
                token.attrs["href"] = self.link(str(token.attrs["href"]), symbol)

    def link(self, target: str, symbol: str) -> str:
        """Return a link of the site for one of the file. Those to code that name a symbol lead to its line."""
        name, _, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return target
        path = os.path.relpath((ROOT / self.path).parent / name, ROOT).replace(os.sep, "/")
        puzzle = re.fullmatch(r"puzzles/p(1[234])_\w+\.py", path)  # those that the playground can check
        if puzzle or (path == "docs/playground.md" and "=" in anchor):  # settings, which GitHub ignores
            return f"{relative('playground', self.address)}/#{f'puzzle={puzzle[1]}' if puzzle else anchor}"
        if path in self.pages:
            return relative(address(path), self.address) + (f"#{anchor}" if anchor else "")
        if path.startswith(PICTURES):
            return target
        if not (ROOT / path).exists():
            raise UserError(f"{self.path} links to {target}, which does not exist")
        is_symbol = path.endswith(".py") and re.fullmatch(r"[\w.]+", symbol)
        return self.checkout.link(path, line_of(ROOT / path, symbol) if is_symbol else 0)

    @property
    def contents(self) -> str:
        """Links to the sections."""
        links = [f'<a class="h{level}" href="#{name}">{html.escape(text)}</a>' for level, text, name, _ in self.parts]
        return "\n".join(links[1:])

    @property
    def sections(self) -> list[tuple[str, str, str]]:
        """Heading, place and text of each section, for the search."""
        return [
            (heading, f"{self.address}#{anchor}", " ".join(" ".join(texts).split()))
            for _, heading, anchor, texts in self.parts
        ]


def plain(token: Token) -> str:
    """Return the text of a paragraph without its Markdown."""
    return "".join(" " if each.type == "softbreak" else each.content for each in token.children or [])
