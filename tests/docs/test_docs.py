"""Pages: commands print what the page shows, code is that of its file, links and files exist."""

import re
from pathlib import Path

import pytest

from docs.programs import make
from docs.programs.make import ROOT, Workspace, blocks, shape

PAGES = make.pages()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def pages_with(speed: str) -> list[Path]:
    return [page for page in PAGES if any(block.speed == speed for block in blocks(page))]


def check_outputs(page: Path, *speeds: str) -> None:
    """Run the blocks with these speeds in order. They must print what the page shows."""
    with Workspace(page) as workspace:
        for block in blocks(page):
            if block.speed not in speeds:
                continue
            output = workspace.run(block)
            if block.shown is not None and block.compare != "nothing":
                seen = shape if block.compare == "shape" else str
                assert seen(output) == seen(block.shown), f"{page.name}:{block.line}: {block.command}"


@pytest.mark.linux  # the digits of other processors differ
@pytest.mark.processes
@pytest.mark.parametrize("page", pages_with("fast"), ids=lambda page: page.name)
def test_fast_commands_print_the_output_on_the_page(page: Path) -> None:
    check_outputs(page, "fast")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages_with("slow"), ids=lambda page: page.name)
def test_all_commands_print_the_output_on_the_page(page: Path) -> None:
    check_outputs(page, "fast", "slow")


@each_page
def test_code_on_the_page_is_that_of_the_file(page: Path) -> None:
    text = page.read_text()
    assert text == make.paste_code(text), "run python -m docs.programs.make --code"


def test_lines_that_a_page_names_are_in_their_functions() -> None:
    """Outputs with stacks are not compared."""
    text = "".join(page.read_text() for page in PAGES)
    places = [(path, line, name) for name, path, line in re.findall(r"(\w+) \(([\w/]+\.py):(\d+)\)", text)]
    places += re.findall(r'([\w/]+\.py)", line (\d+) in (\w+)', text)
    assert places
    files = [file.relative_to(ROOT) for pattern in ("*.py", "[!.]*/**/*.py") for file in ROOT.glob(pattern)]
    for path, line, name in places:
        (file,) = (file for file in files if f"picotron/{file}".endswith(path))
        functions = re.findall(r"^ *def (\w+)", "\n".join(file.read_text().splitlines()[: int(line)]), re.MULTILINE)
        assert functions[-1] == name, f"{path}:{line}"


def test_first_diff_of_the_readme_is_data_parallelism_alone() -> None:
    """Its new lines are those of steps/only_dp.py, one after the other, without comments."""
    diff = re.search(r"^```diff\n(.*?)^```$", Path("README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert diff
    shown = [line[1:] for line in diff[1].splitlines() if not line.startswith("-")]
    program = [
        line.partition("  #")[0].removeprefix("    ") for line in Path("steps/only_dp.py").read_text().splitlines()
    ]
    code = [line.partition("  #")[0] for line in shown]
    assert "\n".join(code) in "\n".join(program)


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@each_page
def test_linked_symbols_and_named_files_exist(page: Path) -> None:
    """Links to other files and to anchors are checked when the site is built."""
    for symbol, link in re.findall(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)", prose(page)):
        found = re.search(rf"\b{symbol.split('.')[-1]}\b", (page.parent / link).read_text())
        assert found, f"{link} lacks {symbol}"  # a function or a class, such as Bucket.launch
    for block in blocks(page):
        for file in re.findall(r"(?<![\w/.])(?:template|tests|docs|steps)/[\w./-]+(?![\w*/.-])", block.command):
            assert (ROOT / file).exists(), f"there is no {file}"


def test_named_tests_exist() -> None:
    files = list(Path("tests").rglob("test_*.py"))
    exist = {name for file in files for name in (file.stem, *re.findall(r"def (test_\w+)", file.read_text()))}
    texts = [page.read_text() for page in (*PAGES, Path("CONTRIBUTING.md"), Path("AGENTS.md"))]
    assert {name for text in texts for name in re.findall(r"`(test_\w+)`", text)} <= exist
