"""README.md and docs/**/*.md: outputs are up to date, and named files, options, symbols and link targets exist."""

import ast
import contextlib
import functools
import io
import itertools
import logging
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.workload import arguments
from docs.programs import code, make
from docs.programs.make import ROOT, Block, Workspace, blocks, keep, shape

PAGES = make.pages()
ALL_BLOCKS = [pytest.param(page, block, id=f"{page.name}:{block.line}") for page in PAGES for block in blocks(page)]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------------------- commands and outputs


def pages_with(speed: str) -> list[Path]:
    return [page for page in PAGES if any(block.speed == speed for block in blocks(page))]


def check_outputs(page: Path, *speeds: str) -> None:
    """Run the blocks with these speeds in order, and compare their outputs and pictures with the page."""
    with Workspace() as workspace:
        for block in blocks(page):
            if block.speed not in speeds:
                continue
            output = workspace.run(block)
            where = f"{page.name}:{block.line}: {block.command}"
            if block.picture is not None and block.compare == "all":
                made = workspace.file(page, block.picture).read_bytes()
                assert made == (page.parent / block.picture).read_bytes(), where
            if block.shown is not None and block.compare != "nothing":
                seen = shape if block.compare == "shape" else str
                assert seen(output) == seen(block.shown), where


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
def test_every_picture_has_the_command_that_makes_it(page: Path) -> None:
    made = {block.picture for block in blocks(page)}
    assert set(re.findall(r"!\[[^\]]*\]\(([^)]*)\)", prose(page))) <= made


OPTIONS = {
    "run": "slow|no, .+",
    "compare": "all|shape|nothing",
    "keep": r"-?\d+( -\d+)?",
    "exit": r"\d+",
}


@each_page
def test_every_block_has_valid_options(page: Path) -> None:
    text, found = page.read_text(), blocks(page)
    languages = re.findall(r"^```(.*)\n(?:.*\n)*?```$", text, re.MULTILINE)
    assert set(languages) <= {"console", "bash", "text", "python", "json", "csv"}
    assert sum(language in ("console", "bash") for language in languages) == sum(b.picture is None for b in found)
    assert text.count("<!-- code") == len(make.CODE.findall(text)), "a comment that belongs to no code"
    comments = [key for key in re.findall(r"<!-- *(\w+):", text) if key != "code"]
    expected = [[*block.options, *(["picture"] if block.picture else [])] for block in found]
    assert comments == [key for keys in expected for key in keys], "a comment that belongs to no block"
    for block in found:
        assert block.speed in ("fast", "slow", "no"), f"line {block.line} does not say how it is run"
        assert block.shown != "", f"line {block.line} shows nothing that the command prints"
        for key, value in block.options.items():
            assert re.fullmatch(OPTIONS[key], value), f"line {block.line}: {key}: {value}"


@each_page
def test_code_on_the_page_is_that_of_the_file(page: Path) -> None:
    text = page.read_text()
    assert text == make.paste_code(text), "run python -m docs.programs.make --code"


# ------------------------------------------------------------------------------------------------ names within commands


def benchmark_help() -> str:
    """Return the help of the parser that all benchmarks share. Some benchmarks call it only after a slow count."""
    output = io.StringIO()
    with mock.patch("sys.argv", ["", "--help"]), contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        arguments("").parse_args()
    return output.getvalue()


@functools.cache
def help_of(program: str, *command: str) -> str:
    """Return the --help output of torchrun or of a program in the repository, or of one of its commands."""
    if program == "torchrun":
        return get_args_parser().format_help()
    if program.startswith("benchmarks.") and program.partition(".")[2] not in (
        "tokens",
        "roofline",
        "schedules",
    ):  # shared options
        return benchmark_help()
    logger, output = logging.getLogger("picotron"), io.StringIO()
    handlers, level = list(logger.handlers), logger.level
    path = program if program.endswith(".py") else program.replace(".", "/")
    path = f"{path}/__main__.py" if Path(path).is_dir() else path.removesuffix(".py") + ".py"
    with (
        mock.patch("sys.argv", [path, *command, "--help"]),
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit),
    ):
        runpy.run_path(path, run_name="__main__")
    logger.handlers[:] = handlers  # programs set up logging
    logger.setLevel(level)
    return output.getvalue()


def programs(script: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each Python program, torchrun or make that a script runs, with its arguments."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for is_separator, command in itertools.groupby(lexer, lambda word: set(word) <= set("&|;()<>")):
            words = [] if is_separator else list(command)
            starts = [
                i for i, word in enumerate(words)
                if (word.endswith(".py") and not {"cat", "sed", "conformance"} & set(words[:i]))  # reads the file
                or word in ("torchrun", "make") or words[max(i - 1, 0)] == "-m"
            ]  # fmt: skip
            for start, end in itertools.pairwise([*starts, len(words)]):
                yield words[start], words[start + 1 : end]


def test_programs_finds_every_program_of_a_script() -> None:
    script = (
        "A=1 torchrun --np 2 \\\n  train.py --config c.json && python -m a.b --out 'x | y' | head  # so\nmake train"
    )
    assert list(programs(script)) == [
        ("torchrun", ["--np", "2"]),
        ("train.py", ["--config", "c.json"]),
        ("a.b", ["--out", "x | y"]),
        ("make", ["train"]),
    ]


@pytest.mark.processes  # starts bash to check the syntax
@pytest.mark.parametrize(("page", "block"), ALL_BLOCKS)
def test_commands_name_existing_files_targets_and_options(page: Path, block: Block) -> None:
    subprocess.run(["bash", "-n", "-c", block.command], check=True)
    for file in re.findall(r"(?<![\w/.])(?:template|tests|docs)/[\w./-]+", block.command):
        assert (ROOT / file).exists(), f"there is no {file}"
    targets = re.findall(r"^([a-z-]+):.*##", Path("Makefile").read_text(), re.MULTILINE)
    for program, words in programs(block.command):
        if program == "make":
            assert {word for word in words if "=" not in word} <= set(targets)
            continue
        if program == "pytest":  # not ours
            continue
        command = words[:1] if program == "picotron.drawing" else []
        for word in words:
            if (
                word.startswith("--") and "exit" not in block.options
            ):  # a command that fails on purpose may have a wrong option
                option = re.escape(word.partition("=")[0])
                assert re.search(rf"{option}(?![\w.-])", help_of(program, *command)), f"{program} has no {word}"


# --------------------------------------------------------------------------------------------------------- link targets


SYMBOL = re.compile(r"\[`([\w.]+)(?<!\.py)`\]\(([^)#\s]+\.py)\)")


def defined_in(file: Path) -> set[str]:
    """Return the dotted names of the classes, functions, methods, constants and fields that a file defines."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(file.read_text()).body, "")
    return found


def test_symbols_are_found_by_their_dotted_names() -> None:
    names = defined_in(ROOT / "picotron" / "config.py")
    assert {"Training", "Training.seed", "Distributed.world_size", "Config.global_batch_size"} <= names
    assert not {"seed", "Training.no_such_key"} & names


@each_page
def test_named_symbols_exist_in_the_linked_file(page: Path) -> None:
    for symbol, file in SYMBOL.findall(prose(page)):
        assert symbol in defined_in(page.parent / file), f"{file} defines no {symbol}"


@each_page
def test_links_into_code_have_no_line_numbers(page: Path) -> None:
    assert re.findall(r"\]\([^)]*\.\w+#L\d+[^)]*\)", prose(page)) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_link_targets_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match("https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_page_of_the_code_lists_every_file() -> None:
    page = Path("docs/code.md").read_text()
    assert page == code.replace_tables(page), "run python -m docs.programs.code"
    listed = re.findall(r"^\| \[[^\]]*\]\(\.\./([^)]*\.py)\) \| .", page, re.MULTILINE)
    folders = (Path("picotron"), Path("conformance"))
    there = [str(path) for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted([*there, *map(str, Path().glob("*.py"))])


def test_page_of_papers_has_every_citation_of_the_code() -> None:
    """Each row of docs/papers.md links to the paper and to all files that cite it."""
    listed: dict[str, list[str]] = {}
    for row in re.findall(r"^\| .*$", Path("docs/papers.md").read_text(), re.MULTILINE):
        for paper in re.findall(r"arxiv\.org/abs/(\d+\.\d+)", row):
            listed.setdefault(paper, []).extend(re.findall(r"\]\(\.\./(picotron/[^)]*\.py)\)", row))
    cited: dict[str, list[str]] = {}
    for path in sorted(Path("picotron").rglob("*.py")):
        for paper in set(re.findall(r"arXiv:(\d+\.\d+)", path.read_text())):
            cited.setdefault(paper, []).append(str(path))
    assert listed == cited


# ---------------------------------------------------------------------------------------------- docs/programs/make.py


def test_blocks_parses_commands_outputs_and_pictures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n<!-- run: slow -->\n<!-- keep: 2 -1 -->\n```console\n$ seq \\\n  9\n1\n2\n```\n"
        "<!-- run: no, it ends the world -->\n```bash\nreboot\nsync\n```\n"
        "```text\n$ echo\n```\n```console\n$ true\n```\n"
        "<!-- run: slow -->\n<!-- picture: draw a -->\n![an a](a.svg)\n"
    )
    slow, never, fast, picture = blocks(page)
    assert slow == Block(2, "seq \\\n  9", "1\n2\n", None, {"run": "slow", "keep": "2 -1"})
    assert never == Block(10, "reboot\nsync\n", None, None, {"run": "no, it ends the world"})
    assert fast == Block(18, "true", "", None, {})
    assert picture == Block(21, "draw a", None, "a.svg", {"run": "slow"})
    assert [block.speed for block in (slow, never, fast, picture)] == ["slow", "no", "fast", "slow"]
    assert [block.compare for block in (slow, fast, picture)] == ["shape", "all", "all"]


@pytest.mark.processes
def test_make_replaces_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "<!-- keep: 1 -1 -->\n```console\n$ seq 5; pwd\nold\n```\n<!-- exit: 3 -->\n```console\n$ exit 3\n```\n"
    page.write_text(text)
    make.make(page, lambda block: True)
    assert page.read_text() == text.replace("old", "1\n...\n~/picotron")
    page.write_text(text)
    make.make(page, lambda block: block.command == "exit 3")
    assert page.read_text() == text
    page.write_text(text.replace("exit: 3", "exit: 4"))
    with pytest.raises(make.CommandFailed, match="line 6: exit 3\nexit status 3"):
        make.make(page, lambda block: True)
    assert "old" in page.read_text()


def test_code_is_pasted_when_it_differs_from_its_file(tmp_path: Path) -> None:
    file, page = tmp_path / "code.py", tmp_path / "page.md"
    file.write_text(
        'class A:\n    """A letter."""\n\n    @staticmethod\n    def f() -> int:  # one\n        return 1\n\n\n'
        'def g() -> None:\n    """Do\n    nothing.\n    """\n'
    )
    method = "@staticmethod\ndef f() -> int:  # one\n    return 1\n"
    indented = "".join(f"    {line}\n" for line in method.splitlines())
    for symbols, pasted in {
        "A.f": method,
        "A.f g": method + '\ndef g() -> None:\n    """Do\n    nothing.\n    """\n',
        "A": f'class A:\n    """A letter."""\n\n{indented}',
        "A, without docstring": f"class A:\n{indented}",
    }.items():
        block = f"<!-- code: {file} {symbols} -->\n```python\n{{}}```\n"
        assert make.paste_code(block.format("old\n")) == block.format(pasted)
        assert make.paste_code(block.format("")) == make.paste_code(block.format(pasted)) == block.format(pasted)
    page.write_text(block.format("old\n"))
    with mock.patch("sys.argv", ["make", "--code", str(page)]), pytest.raises(SystemExit, match=r"^False$"):
        make.main()
    assert page.read_text() == block.format(pasted)
    with pytest.raises(LookupError, match=r"defines no A\.g"):
        make.paste_code(block.format("").replace(" A,", " A.g,"))


@pytest.mark.processes
def test_make_shows_output_as_a_terminal_does(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ printf ' 9%%\\r 100%%\\n1,2\\r\\n'\n```\n")
    make.make(page, lambda block: True)
    assert page.read_text().splitlines()[2:] == [" 100%", "1,2", "```"]


def test_keep_and_shape_select_the_compared_output() -> None:
    lines = ["1", "2", "3", "4"]
    assert (keep(lines, ""), keep(lines, "1"), keep(lines, "-1")) == (lines, ["1", "..."], ["...", "4"])
    assert (keep(lines, "1 -1"), keep(lines, "2 -2")) == (["1", "...", "4"], lines)
    assert shape("step  1 | 1,234 tokens/s | 3.5e-04") == shape("step 12 | 999 tokens/s | 1e-3") != shape("step 1")
