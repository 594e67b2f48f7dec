"""Build of the website: README, the steps and all pages, with the playground and the notebooks, as static files.

    make site                                    writes site/
    python -m http.server --directory site       serves it on this machine, on port 8000

The pages are those that GitHub shows. Links between them stay in the site; links to code lead to the commit.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from string import Template
from urllib.parse import unquote

from docs.programs.make import pages as pages_of_repository
from docs.site import notebooks
from docs.site.pages import PICTURES, ROOT, Checkout, Page, address, block, relative
from picotron.console import UserError
from playground.build import build as build_playground
from playground.build import write_worker

HERE = Path(__file__).resolve().parent
# The order in which one reads the pages. README.md has that of the pages to learn from.
GROUPS = {
    "Start": ["README.md", "docs/first_hour.md", "steps/README.md", "docs/puzzles.md", "docs/playground.md"],
    "Learn": [],
    "Use": [f"docs/{name}.md" for name in ("grpo", "own_data", "own_loops", "reference/configuration", "reference/machines")],
    "Check": [f"docs/reference/{name}.md" for name in (
        "conformance", "course", "peers", "peers_from_checkouts", "promises", "parity", "gpu", "benchmarks", "forecasts",
        "published_schedules", "axis_derivations",
    )],
    "Look up": ["docs/terms.md", "docs/papers.md", "docs/code.md", "docs/solutions/answers.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}  # fmt: skip
SHORT = {"README.md": "Overview", "steps/README.md": "Steps"}  # titles in the navigation
COLAB = "https://colab.research.google.com/github"


def reading_order() -> dict[str, list[str]]:
    """Return the pages of each group.

    Raises:
        UserError: a page is in no group.
    """
    table = (ROOT / "README.md").read_text().partition("\n## Learn\n")[2].partition("\n- ")[0]
    groups = GROUPS | {"Learn": re.findall(r"\]\((docs/\w+\.md)\)", "".join(re.findall(r"^\|.*", table, re.MULTILINE)))}
    placed = [page for pages in groups.values() for page in pages]
    if missing := {page.relative_to(ROOT).as_posix() for page in pages_of_repository()} - set(placed):
        raise UserError(f"GROUPS in docs/site/build.py lacks {', '.join(sorted(missing))}")
    return groups


def navigation(groups: dict[str, list[str]], titles: dict[str, str], here: str) -> str:
    lines = []
    for group, pages in groups.items():
        lines.append(f"<h2>{group}</h2>\n<ul>")
        for page in pages:
            current = ' aria-current="page"' if address(page) == here else ""
            lines.append(f'<li><a href="{relative(address(page), here)}"{current}>{html.escape(titles[page])}</a></li>')
        lines.append("</ul>")
    return "\n".join(lines)


def neighbours(order: list[str], titles: dict[str, str], page: str) -> str:
    """Return links to the previous and to the next page."""
    i = order.index(page)
    around = {"prev": order[i - 1 : i] if i else [], "next": order[i + 1 : i + 2]}
    return "".join(
        f'<a rel="{name}" href="{relative(address(other), address(page))}">{html.escape(titles[other])}</a>'
        for name, others in around.items()
        for other in others
    )


def notebook_buttons(checkout: Checkout) -> dict[str, str]:
    """Return links to the notebook of each step, by the headings of steps/README.md."""
    buttons = {}
    for heading, name in notebooks.headings().items():
        links = f'<a class="play" href="../notebooks/{name}.ipynb" download>Download the notebook</a>'
        if checkout.on_web:
            place = f"{COLAB}{checkout.repository.removeprefix('https://github.com')}/blob/notebooks/{name}.ipynb"
            links = f'<a class="play" href="{place}">Run it in Colab</a> {links}'
        buttons[heading] = f'<span class="buttons">{links}</span>'
    return buttons


def landing(checkout: Checkout) -> str:
    """Return the content of the first page. Its program, layouts and loss are those of steps/."""
    program = (ROOT / "steps/s9_cp.py").read_text()
    session = re.search(
        r"^\$ for run in (.*?)^ +\d+ step 10 \| loss (\S+)$", (ROOT / "steps/README.md").read_text(), re.M | re.S
    )
    assert session, "steps/README.md shows no losses of all steps"
    runs = re.findall(r'"(\d+) (s[1-9]_\w+) ([^"]*)"', session[1])
    rows = [("1", "s1_one_process", ""), *runs]
    losses = "\n".join(
        f"<tr><td>{name}</td><td>{options}</td><td>{ranks}</td><td>{session[2]}</td></tr>"
        for ranks, name, options in rows
    )
    clone = f"git clone {checkout.repository} picotron && cd picotron\n" if checkout.on_web else ""
    return Template((HERE / "landing.html").read_text()).substitute(
        lines=len(program.splitlines()),
        code=checkout.link("steps/s9_cp.py"),
        program=block(program, "python", "index.html"),
        losses=losses,
        commands=block(
            f"{clone}make steps   # this program on 16 ranks (1 min)\n"
            "make train   # the trainer that grows from it (3 min)\n", "bash", "index.html",
        ),
    )  # fmt: skip


def build(out: Path, checkout: Checkout, pyodide: Path | None = None) -> None:
    """Write the site.

    Args:
        out: the folder; an earlier site in it is replaced.
        pyodide: a copy of Pyodide for the playground, see playground/build.py.

    Raises:
        UserError: `out` holds something else, a page is in no group, or a link leads nowhere.
    """
    if out.exists() and any(out.iterdir()) and not (out / "search.js").is_file():
        raise UserError(f"--out {out} is not empty and holds no site; choose another folder")
    shutil.rmtree(out, ignore_errors=True)
    build_playground(out / "playground", pyodide)
    groups = reading_order()
    order = [page for pages in groups.values() for page in pages]
    buttons = notebook_buttons(checkout)
    pages = {path: Page(path, order, checkout, buttons if path == "steps/README.md" else {}) for path in order}
    titles = {path: page.title.partition(":")[0] for path, page in pages.items()} | SHORT
    layout = Template((HERE / "page.html").read_text())

    def write(here: str, **values: str) -> None:
        (out / here).parent.mkdir(parents=True, exist_ok=True)
        code = checkout.link(".") if checkout.on_web else ROOT.as_uri()
        shared = {"root": relative(".", here), "pages": navigation(groups, titles, here), "code": code}
        (out / here).write_text(layout.substitute(shared, **values))

    for path, page in pages.items():
        footer = (
            f'<footer>{neighbours(order, titles, path)}<a href="{checkout.link(path)}">Source of this page</a></footer>'
        )
        contents = "\n".join(
            f'<a class="h{level}" href="#{anchor}">{html.escape(text)}</a>'
            for level, text, anchor in page.headings
            if level in (2, 3)
        )
        write(
            page.address,
            kind="page",
            title=f"{html.escape(page.title)} · picotron",
            body=page.html + footer,
            contents=contents,
        )
    write(
        "index.html",
        kind="landing",
        title="picotron: 4D parallelism, written to be read",
        body=landing(checkout),
        contents="",
    )
    sections = [
        [titles[path], heading, f"{page.address}#{anchor}", " ".join(" ".join(texts).split())]
        for path, page in pages.items()
        for (_, heading, anchor), texts in zip(page.headings, page.texts, strict=True)
    ]
    (out / "search.js").write_text(f"const SECTIONS = {json.dumps(sections, ensure_ascii=False)};\n")
    shutil.copytree(ROOT / PICTURES, out / PICTURES)
    for name in ("style.css", "script.js", "offline.js"):
        shutil.copy(HERE / name, out / name)
    notebooks.write(out / "notebooks", checkout)
    check_links(out)
    kept = [
        path
        for path in out.rglob("*")
        if path.is_file() and path.relative_to(out).parts[0] not in ("playground", "notebooks")
    ]
    write_worker(out / "offline.js", kept)


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


def this_checkout() -> Checkout:
    """Return the commit of this checkout, in the repository that it was cloned from, if that is on the web."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    origin = re.sub(r"^git@([^:]+):", r"https://\1/", git("remote", "get-url", "origin")).removesuffix(".git")
    return Checkout(origin if origin.startswith("https://") else str(ROOT), git("rev-parse", "HEAD"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m docs.site.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pyodide", type=Path, help="folder with a copy of Pyodide; by default its CDN is used")
    parser.add_argument("--out", type=Path, default=Path("site"), help="folder to write; by default site")
    options = parser.parse_args(arguments)
    try:
        build(options.out, this_checkout(), options.pyodide)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{options.out}/index.html; to see it: python -m http.server --directory {options.out}")


if __name__ == "__main__":
    main()
