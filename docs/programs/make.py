"""Update of README.md, steps/README.md and docs/*.md: run the commands of a page and write their output into it.

    make docs                                         all pages
    python -m docs.programs.make docs/checkpoints.md  some pages
    python -m docs.programs.make --code               no command: only the code on all pages

tests/docs/test_docs.py checks that outputs and code have not changed. A page can have five kinds of blocks:

    ```console                  a command, and its output, including stderr
    $ make help
    ...
    ```
    ```bash                     a script whose output is not shown
    <!-- picture: python -m docs.programs.pictures axes --out docs/pictures/axes.svg -->
    ![Sixteen ranks](pictures/axes.svg)                                     a picture, and the command that draws it
    <!-- code: picotron/data_parallel/data_parallel.py Bucket.reset Bucket.launch -->
    ```python                   the source of functions, methods or classes of a file, or all of it; with
    ...                         `, without docstring` before the end of the comment, without theirs
    ```
    <!-- file: sums.py -->
    ```python                   a program of the page alone, which its commands run as this file
    ...
    ```

Comments before the other blocks are their options:

    <!-- run: slow -->          run in `make docs` and `make pages`, but not in `make test`; a bash block is never fast
    <!-- run: no, REASON -->    never run it; the tests only check that its files exist
    <!-- compare: shape -->     let the tests compare `all` of the output, its `shape` (without numbers) or `nothing`;
                                by default, all of it for fast blocks and its shape for slow ones. Pictures are drawn
                                again, and not compared.
    <!-- keep: 3 -5 -->         show the first three lines and the last five
    <!-- exit: 1 -->            expect this exit status instead of 0

The commands of a page run in order, in a copy of the repository in a new home folder. In the output shown, this home
folder is ~ and the copy ~/picotron.
"""

import argparse
import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<options>(?:^<!-- \w+: .* -->\n)*)"
    r"(?:^```console\n\$ (?P<console>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!```).*\n)*)```$"
    r"|^```bash\n(?P<bash>(?:(?!```).*\n)*)```$"
    r"|^<!-- picture: (?P<drawing>.*) -->\n!\[[^\]]*\]\((?P<picture>[^)]*)\)$)",
    re.MULTILINE,
)
CODE = re.compile(
    r"^<!-- code: (?P<file>\S+)(?P<symbols>[\w. ]*?)(?P<bare>, without docstring)? -->\n"
    r"```python\n(?P<shown>(?:(?!```).*\n)*)```$",
    re.MULTILINE,
)
PROGRAM = re.compile(r"^<!-- file: (\S+) -->\n```python\n((?:(?!```).*\n)*)```$", re.MULTILINE)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "steps/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclasses.dataclass(frozen=True)
class Block:
    """A command on a page, with the output shown there or its picture. A bash block has neither."""

    line: int
    command: str
    shown: str | None
    picture: str | None
    options: dict[str, str]

    @classmethod
    def of(cls, match: re.Match[str]) -> "Block":
        line = match.string.count("\n", 0, match.start()) + 1
        options = dict(re.findall(r"^<!-- (\w+): (.*) -->$", match["options"], re.MULTILINE))
        command = match["console"] or match["bash"] or match["drawing"]
        block = cls(line, command, match["shown"], match["picture"], options)
        if block.speed not in ("fast", "slow", "no") or block.compare not in ("all", "shape", "nothing"):
            raise ValueError(f"line {line} has unknown options or does not say how it is run: {options}")
        return block

    @property
    def speed(self) -> str:
        """`fast`, `slow` or `no`. A bash block has no default, because it can take any time."""
        is_bash = self.shown is None and self.picture is None
        return self.options.get("run", "" if is_bash else "fast").split(",")[0]

    @property
    def compare(self) -> str:
        return self.options.get("compare", "all" if self.speed == "fast" else "shape")


def blocks(page: Path) -> list[Block]:
    return [Block.of(match) for match in BLOCK.finditer(page.read_text())]


class CommandFailed(Exception):
    pass


class Workspace:
    """A copy of the repository in a new home folder, with the programs of a page. As a context manager, it deletes the
    copy at the end.
    """

    def __init__(self, page: Path = ROOT / "README.md") -> None:
        self.home = Path(tempfile.mkdtemp(prefix="picotron-docs-")).resolve()
        self.root = self.home / "picotron"
        list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        for name, program in PROGRAM.findall(page.read_text()):
            (self.root / name).write_text(program)
        environment = self.root / ".venv"  # a folder of links, so that make considers it installed
        environment.mkdir()
        for path in Path(sys.prefix).iterdir():
            (environment / path.name).symlink_to(path)
        (environment / ".installed").touch()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.home, ignore_errors=True)  # a killed process may still write there

    def file(self, page: Path, link: str) -> Path:
        """Return the copy of a file that a page links to."""
        return self.root / (page.parent / link).resolve().relative_to(ROOT)

    def run(self, block: Block) -> str:
        """Run a command and return the lines of its output that the page shows.

        Raises:
            CommandFailed: the exit status differs from the expected one.
        """
        folders = [str(self.root / ".venv/bin"), os.environ["PATH"]]
        if not Path(sys.executable).parent.samefile(folders[0]):  # a test has another Python
            folders.insert(0, str(Path(sys.executable).parent))
        variables = {
            "PATH": ":".join(folders), "HOME": str(self.home), "COLUMNS": "120",
            "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.command], cwd=self.root, env=variables, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        # A terminal shows only the last state of a progress bar.
        text = re.sub(r"[^\n]*\r(?!\n)", "", done.stdout.decode())
        lines = [line.rstrip() for line in text.strip("\n").replace(str(self.home), "~").splitlines()]
        if done.returncode != int(block.options.get("exit", 0)):
            printed = "\n".join(lines)
            raise CommandFailed(f"line {block.line}: {block.command}\nexit status {done.returncode}\n{printed}")
        return "".join(line + "\n" for line in keep(lines, block.options.get("keep", "")))


def keep(lines: list[str], counts: str) -> list[str]:
    """Return the first and the last lines of an output, for counts like `3 -5`; an empty text keeps all lines."""
    numbers = [int(count) for count in counts.split()]
    first, last = sum(n for n in numbers if n > 0), -sum(n for n in numbers if n < 0)
    if not numbers or len(lines) <= first + last:
        return lines
    return [*lines[:first], "...", *lines[len(lines) - last :]]


def shape(output: str) -> str:
    """Replace every number in an output by 0, and the unit of a rate, which depends on the rate."""
    numbers = re.sub(r"\d[\d.,]*(e[+-]\d+)?", "0", output)
    return re.sub(r"\s+", " ", re.sub(r"\b0[kMG]?B", "0B", numbers))


def source(file: Path, symbol: str, with_docstring: bool = True) -> str:
    """Return the source of a function or a class, with its decorators and without the indentation of its class.

    Args:
        symbol: dotted name, such as `Bucket.launch`.

    Raises:
        LookupError: the file defines no such function or class.
    """
    text = file.read_text()
    node: ast.Module | ast.FunctionDef | ast.ClassDef = ast.parse(text)
    for name in symbol.split("."):
        found = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name]
        if not found:
            raise LookupError(f"{file} defines no {symbol}")
        node = found[0]
    assert not isinstance(node, ast.Module)
    first = min(each.lineno for each in (node, *node.decorator_list))
    lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
    if not with_docstring and ast.get_docstring(node) is not None:
        begin, end = node.body[0].lineno - first, (node.body[0].end_lineno or 0) - first + 1
        end += lines[end : end + 1] == ["\n"]  # the empty line after the docstring of a class
        del lines[begin:end]
    return textwrap.dedent("".join(lines))


def repository() -> str:
    """Return the address of this project on the web, which CITATION.cff has."""
    (address,) = re.findall(r'^repository-code: "(.*)"', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    return str(address)


def paste_code(text: str) -> str:
    """Replace the code on a page by the source of its symbols, with an empty line between two of them, and the address
    that `git clone` takes by that of this project.
    """

    def paste(match: re.Match[str]) -> str:
        file, symbols = ROOT / match["file"], match["symbols"].split()
        sources = [source(file, symbol, not match["bare"]) for symbol in symbols] or [file.read_text()]
        return match[0].removesuffix(match["shown"] + "```") + "\n".join(sources) + "```"

    return CODE.sub(paste, re.sub(r"(?<=^git clone )\S+", repository(), text, flags=re.MULTILINE))


def make(page: Path, wanted: Callable[[Block], bool]) -> None:
    """Run the wanted blocks of a page, and write their output and the page's code into it.

    Raises:
        CommandFailed: a command ends with an unexpected exit status.
        LookupError: a symbol, whose code the page shows, does not exist.
        OSError: a command did not write its picture, or a file with code does not exist.
    """

    def run(match: re.Match[str]) -> str:
        block = Block.of(match)
        if block.speed not in ("fast", "slow") or not wanted(block):
            return match[0]
        print(f"{page.name}:{block.line}: {block.command}", flush=True)
        output = workspace.run(block)
        if block.picture is not None:
            (page.parent / block.picture).parent.mkdir(exist_ok=True)
            shutil.copyfile(workspace.file(page, block.picture), page.parent / block.picture)
        return match[0] if block.shown is None else match[0].removesuffix(block.shown + "```") + output + "```"

    with Workspace(page) as workspace:
        page.write_text(paste_code(BLOCK.sub(run, page.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run the commands on README.md, steps/README.md and docs/*.md, and write their output into these pages."
    )
    parser.add_argument("pages", nargs="*", type=Path, help="pages to update; default: all")
    parser.add_argument("--code", action="store_true", help="run no command: only update the code on the pages")
    parser.add_argument("--fast", action="store_true", help="skip slow commands and keep their output")
    options = parser.parse_args()
    failed = False
    for page in [path.resolve() for path in options.pages] or pages():
        try:
            if options.code:
                page.write_text(paste_code(page.read_text()))
                continue
            make(page, lambda block: block.speed == "fast" or not options.fast)
        except (CommandFailed, LookupError, OSError) as error:
            failed = True
            print(f"{page.name} was not updated: {error}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
