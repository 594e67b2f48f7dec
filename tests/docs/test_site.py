"""The website: its pages in order, links, search, copies for visits without a network, and notebooks of the steps."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs.programs.make import Workspace
from docs.site import notebooks
from docs.site.build import attributes, build, check_links, reading_order
from docs.site.pages import ROOT, Checkout, address
from picotron.console import UserError
from playground.build import results

CHECKOUT = Checkout("https://github.com/owner/picotron", "0123456789" * 4)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder, CHECKOUT)
    return folder


def test_next_leads_through_all_pages_in_reading_order(site: Path) -> None:
    order = [address(page) for pages in reading_order().values() for page in pages]
    seen, here = [], order[0]
    while here:
        seen.append(here)
        following = re.search(r'href="([^"]*)" rel="next"', (site / here).read_text())
        here = os.path.normpath(Path(here).parent / following[1]) if following else ""
    assert seen == order
    assert {path.relative_to(site).as_posix() for path in site.rglob("*.html")} == {
        *order,
        "index.html",
        "playground/index.html",
    }


@pytest.mark.parametrize("link", ["nowhere.html", "zero.html#nowhere"])
def test_build_refuses_a_link_that_leads_nowhere(site: Path, tmp_path: Path, link: str) -> None:
    copy = shutil.copytree(site, tmp_path / "copy")
    assert check_links(copy) > 2000
    with (copy / "docs/memory.html").open("a") as file:
        file.write(f'<a href="{link}">there</a>')
    with pytest.raises(UserError, match=re.escape(f"docs/memory.html: {link}")):
        check_links(copy)


def test_links_to_code_lead_to_lines_of_the_commit(site: Path) -> None:
    lines = 0
    for link in {
        link
        for page in site.rglob("*.html")
        for link in attributes(page, "href|src")
        if link.startswith(CHECKOUT.repository)
    }:
        path, _, line = link.removeprefix(f"{CHECKOUT.repository}/").partition("/")[2].partition("#L")
        assert path.startswith(CHECKOUT.commit), link
        file = ROOT / path.removeprefix(CHECKOUT.commit).strip("/").partition("#")[0]
        assert file.exists(), link
        if line:
            lines += 1
            assert re.match(r" *(def|class) ", file.read_text().splitlines()[int(line) - 1]), link
    assert lines > 20


def test_llms_txt_lists_the_markdown_of_all_pages(site: Path) -> None:
    text, raw = (site / "llms.txt").read_text(), f"{CHECKOUT.repository}/raw/{CHECKOUT.commit}/"
    found = re.findall(rf"^- \[.+\]\({raw}(.+)\)$", text, re.MULTILINE)
    assert found == [page for pages in reading_order().values() for page in pages]
    assert re.match(r"# picotron\n\n> .*\n\n## ", text)


def test_search_finds_text_in_folds_and_in_code(site: Path) -> None:
    sections = json.loads((site / "search.js").read_text().removeprefix("const SECTIONS = ").rstrip(";\n"))
    page = (ROOT / "docs/collectives.md").read_text()
    folded = re.search(r"^<summary>.*\n\n(\w[\w ,]{30,})", page, re.MULTILINE)
    code = re.search(r"```text\n(?:.*\n)?(.*)", page)
    assert folded
    assert code
    for text in (folded[1].strip(), " ".join(code[1].split())):
        assert {section[2].partition("#")[0] for section in sections if text in section[3]} == {"docs/collectives.html"}
    for _, _, place, _ in sections:
        page, _, anchor = place.partition("#")
        assert anchor in attributes(site / page, "id")


def test_all_that_pages_load_is_kept_for_visits_without_a_network(site: Path) -> None:
    files = re.search(r"FILES = (\[.*?\]);", (site / "offline.js").read_text())
    assert files
    kept = set(json.loads(files[1]))
    for page in site.rglob("*.html"):
        for link in attributes(page, "href|src") if "playground" not in page.parts else []:
            name = os.path.normpath(page.parent.relative_to(site) / link.partition("#")[0])
            if not re.match(r"[a-z]+:", link) and not name.startswith(("playground", "notebooks")):
                assert name in kept or not link.partition("#")[0], link


def test_playground_knows_the_settings_of_links(site: Path) -> None:
    settings = {
        link.partition("#")[2]
        for page in site.rglob("*.html")
        for link in attributes(page, "href|src")
        if "playground/#" in link
    }
    assert len(settings) > 3
    for each in settings:
        for result in results(each):
            assert "error" not in result["result"], each


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A repository with this tree as its only commit, which notebooks clone."""
    folder = tmp_path_factory.mktemp("repository")
    git = ["git", "-c", "user.name=picotron", "-c", "user.email=picotron@localhost"]
    with Workspace() as workspace:
        shutil.copytree(workspace.root, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "steps"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return Checkout(str(folder), done.stdout.strip())


def run(cell: dict[str, Any]) -> str:
    """Run a cell as a notebook would: Python, a file, or a script of bash. Returns what it prints."""
    magic, _, text = cell["source"].partition("\n")
    if magic == "%%bash":
        done = subprocess.run(["bash", "-e", "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    if magic.startswith("%%writefile "):
        Path(magic.split()[1]).write_text(text)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(cell["source"], {})
        return output.getvalue()
    return ""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", notebooks.CHANGES)
def test_notebook_runs_and_its_change_has_the_announced_effect(
    name: str, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = [cell for cell in notebooks.notebook(name, checkout)["cells"] if cell["cell_type"] == "code"]
    *_, program, command = cells
    before = [run(cell) for cell in cells][-1].splitlines()
    assert before[-1] == f"step 10 | loss {notebooks_loss(name)}"
    change = notebooks.CHANGES[name]
    assert program["source"].count(change["old"]) == 1
    run({"source": program["source"].replace(change["old"], change["new"])})
    after = run(command).splitlines()
    assert (
        next((i for i, pair in enumerate(zip(before, after, strict=True), 1) if len(set(pair)) > 1), 0)
        == change["first"]
    )


def notebooks_loss(name: str) -> str:
    """Return the last loss of a program, from the page."""
    losses = re.findall(r"^ +\d+ step 10 \| loss (\S+)$", (ROOT / "steps/README.md").read_text(), re.MULTILINE)
    return losses[{"s10_ep": 1, "s11_muon": 2}.get(name, 0)]
