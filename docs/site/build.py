"""Build of the website: README, the steps and all pages, with the playground and the notebooks, as static files.

    make site                                    writes site/
    python -m http.server --directory site       serves it on this machine, on port 8000

The pages are those that GitHub shows. Links between them stay in the site; links to code lead to the commit.
"""

import argparse
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
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
    "Use": [f"docs/{name}.md" for name in (
        "own_data", "own_loops", "float8", "optimizer_states", "generation", "grpo", "sweeps", "reference/data_files", "reference/own_loops_in_depth", "reference/configuration", "reference/machines")],
    "Check": [f"docs/reference/{name}.md" for name in (
        "conformance", "course", "trainers", "peers", "reports", "promises", "parity", "gpu", "benchmarks", "forecasts",
        "published_schedules", "schedules_in_depth", "axis_derivations",
    )],
    "Look up": ["docs/terms.md", "docs/papers.md", "docs/code.md", "docs/solutions/answers.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}  # fmt: skip
SHORT = {"README.md": "Overview", "steps/README.md": "Steps"}  # titles in the navigation
APART = ("playground", "notebooks")  # not kept for visits without a network, or kept by itself


def reading_order() -> dict[str, list[str]]:
    """Return the pages of each group.

    Raises:
        UserError: a page is in no group.
    """
    table = (ROOT / "README.md").read_text().partition("\n## Learn\n")[2].partition("\n|")[2].partition("\n\n")[0]
    learn = re.findall(r"\]\((docs/\w+\.md)\)", table)
    groups = {group: [page for page in pages if page not in learn] or learn for group, pages in GROUPS.items()}
    placed = [page for pages in groups.values() for page in pages]
    if missing := {page.relative_to(ROOT).as_posix() for page in pages_of_repository()} - set(placed):
        raise UserError(f"GROUPS in docs/site/build.py lacks {', '.join(sorted(missing))}")
    return groups


def navigation(groups: dict[str, list[str]], titles: dict[str, str], here: str) -> tuple[str, str]:
    """Return links to all pages, and to those before and after a page."""

    def link(page: str, relation: str) -> str:
        return f'<a href="{relative(address(page), here)}"{relation}>{html.escape(titles[page])}</a>'

    lines, around = [], []
    for group, pages in groups.items():
        lines.append(f"<h2>{group}</h2>")
        lines += [link(page, ' aria-current="page"' if address(page) == here else "") for page in pages]
    for before, after in itertools.pairwise(page for pages in groups.values() for page in pages):
        if address(after) == here:
            around.append(link(before, ' rel="prev"'))
        if address(before) == here:
            around.append(link(after, ' rel="next"'))
    return "\n".join(lines), "".join(around)


def landing(checkout: Checkout) -> str:
    """Return the content of the first page. Its program, layouts and loss are those of steps/."""
    program = (ROOT / "steps/s9_cp.py").read_text()
    shown = (ROOT / "steps/README.md").read_text().partition("$ for run in ")[2]
    loss = re.search(r"step 10 \| loss (\S+)", shown)
    assert loss, "steps/README.md shows no losses of all steps"
    runs = re.findall(r'"(\d+) (s[1-9]_\w+) ([^"]*)"', shown)
    cells = [f"<td>{name}</td><td>{options}</td><td>{ranks}</td><td>{loss[1]}</td>" for ranks, name, options in runs]
    return Template((HERE / "landing.html").read_text()).substitute(
        **{
            name: len((ROOT / f"steps/{name}.py").read_text().splitlines())
            for name in ("s9_cp", "llama", "communication")
        },
        code=checkout.link("steps/s9_cp.py"),
        program=block(program, "python"),
        losses="\n".join(f"<tr>{cell}</tr>" for cell in cells),
        loss=loss[1],
        clone=f"git clone {checkout.repository} picotron &amp;&amp; cd picotron\n" if checkout.on_web else "",
    )


def index_for_assistants(groups: dict[str, list[str]], titles: dict[str, str], checkout: Checkout) -> str:
    """Return the content of llms.txt (see llmstxt.org): the pages as Markdown, in reading order."""
    title, summary, *_ = (ROOT / "README.md").read_text().split("\n\n")
    lines = [title, "> " + summary.strip("*").replace("\n", " ")]
    for group, pages in groups.items():
        links = (f"- [{titles[page]}]({checkout.link(page).replace('/blob/', '/raw/')})" for page in pages)
        lines.append("\n".join([f"## {group}\n", *links]))
    return "\n\n".join(lines) + "\n"


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


def build(out: Path, checkout: Checkout, pyodide: Path | None = None) -> None:
    """Write the site.

    Args:
        out: the folder; an earlier site in it is replaced.
        pyodide: a copy of Pyodide for the playground, see playground/build.py.

    Raises:
        UserError: `out` holds something else, a page is in no group, or a link leads nowhere.
    """
    found = {path.name for path in out.iterdir()} if out.exists() else set()
    if found and not found & {"playground", "offline.js"}:  # the second one of a site that was the playground alone
        raise UserError(f"{out} is not empty and holds no site; move it to another place")
    groups, buttons = reading_order(), notebooks.buttons(checkout)
    order = [page for pages in groups.values() for page in pages]
    pages = {path: Page(path, order, checkout, buttons) for path in order}
    titles = {path: page.title.partition(":")[0] for path, page in pages.items()} | SHORT
    shutil.rmtree(out, ignore_errors=True)
    build_playground(out / "playground", pyodide)
    layout = Template((HERE / "page.html").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = ("4D parallelism, written to be read", landing(checkout), "", "docs/site/landing.html")
    bodies = {"index.html": first} | {p.address: (p.title, p.html, p.contents, p.path) for p in pages.values()}
    for here, (title, body, contents, source) in bodies.items():
        links, around = navigation(groups, titles, here)
        text = layout.substitute(
            root=relative(".", here), kind="landing" if here == "index.html" else "page", title=html.escape(title),
            body=body, contents=contents, pages=links, around=around, source=checkout.link(source), code=checkout.link("."),
            version=version,
        )  # fmt: skip
        (out / here).parent.mkdir(parents=True, exist_ok=True)
        (out / here).write_text(text)
    sections = [[titles[path], *section] for path, page in pages.items() for section in page.sections]
    (out / "search.js").write_text(f"const SECTIONS = {json.dumps(sections, ensure_ascii=False)};\n")
    (out / "llms.txt").write_text(index_for_assistants(groups, titles, checkout))
    shutil.copytree(ROOT / PICTURES, out / PICTURES)
    for name in ("style.css", "script.js", "offline.js"):
        shutil.copy(HERE / name, out / name)
    notebooks.write(out / "notebooks", checkout)
    check_links(out)
    kept = (path for path in out.rglob("*") if path.is_file())
    write_worker(out / "offline.js", [path for path in kept if path.relative_to(out).parts[0] not in APART])


def this_checkout() -> Checkout:
    """Return the commit of this checkout, in the repository that it was cloned from, if that is on the web."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    origin = re.sub(r"^git@([^:]+):", r"https://\1/", git("remote", "get-url", "origin")).removesuffix(".git")
    return Checkout(origin if origin.startswith("https://") else str(ROOT), git("rev-parse", "HEAD"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m docs.site.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pyodide", type=Path, help="folder with a copy of Pyodide; by default its CDN is used")
    try:
        build(Path("site"), this_checkout(), parser.parse_args().pyodide)
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if not error.filename:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}; work in a clone of this repository that you may write to")
    print("site/index.html; to see it: python -m http.server --directory site")
