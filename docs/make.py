"""Keeps README.md and docs/*.md true:  make docs,  or  python -m docs.make docs/checkpoints.md  for some of the pages

It runs what a page runs and writes into the page what that prints; tests/test_docs.py checks that nothing has changed.

    ```console                  a command and what it printed, errors too
    $ make help
    ...
    ```
    ```bash                     a script whose output is not shown
    <!-- picture: python -m docs.run_pictures batch --out docs/pictures/batch.svg -->
    ![A global batch](pictures/batch.svg)                                     a picture and the command that makes it

Comments before these say how:

    <!-- run: slow -->          by `make docs` and `make parity`, not by `make test`. A bash block is never fast.
    <!-- run: no, WHY -->       never; the tests only check its options and files
    <!-- compare: shape -->     tests compare `all` of the output, its `shape` (all but numbers) or `nothing`;
                                by default all of what is fast, and the shape of what is slow
    <!-- keep: 3 -5 -->         show the first three lines and the last five
    <!-- exit: 1 -->            how it ends, if not with 0

The commands of a page run in their order, in a copy of the repository that is as fresh as its home folder. In what is
shown, that home is ~ and the copy ~/picotron.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?P<options>(?:^<!-- \w+: .* -->\n)*)"
    r"(?:^```console\n\$ (?P<console>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!```).*\n)*)```$"
    r"|^```bash\n(?P<bash>(?:(?!```).*\n)*)```$"
    r"|^<!-- picture: (?P<drawing>.*) -->\n!\[[^\]]*\]\((?P<picture>[^)]*)\)$)",
    re.MULTILINE,
)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclasses.dataclass(frozen=True)
class Block:
    """Something that a page runs: it has an output that is shown, or a picture, or neither (bash)."""

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
        return cls(line, command, match["shown"], match["picture"], options)

    @property
    def speed(self) -> str:
        """fast, slow or no; what else is written there is a mistake."""
        is_bash = self.shown is None and self.picture is None
        return self.options.get("run", "none given" if is_bash else "fast").split(",")[0]

    @property
    def compare(self) -> str:
        return self.options.get("compare", "all" if self.speed == "fast" or self.picture else "shape")


def blocks(page: Path) -> list[Block]:
    return [Block.of(match) for match in BLOCK.finditer(page.read_text())]


class CommandFailed(Exception):
    pass


class Workspace:
    """A copy of the repository in a home folder of its own. As a context it is deleted in the end."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="picotron-docs-")).resolve()
        self.root = self.home / "picotron"
        list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        environment = self.root / ".venv"  # a folder of links, so that make takes it for installed
        environment.mkdir()
        for path in Path(sys.prefix).iterdir():
            (environment / path.name).symlink_to(path)
        (environment / ".installed").touch()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.home, ignore_errors=True)  # what was killed may still write there

    def file(self, page: Path, link: str) -> Path:
        """What is here in place of a file that a page links to."""
        return self.root / (page.parent / link).resolve().relative_to(ROOT)

    def run(self, block: Block) -> str:
        """What a command prints, or as much of it as a page shows.

        Raises:
            CommandFailed: it ends in another way than the page says.
        """
        variables = {
            "PATH": f"{self.root}/.venv/bin:{os.environ['PATH']}", "HOME": str(self.home), "COLUMNS": "120",
            "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.command], cwd=self.root, env=variables, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        # Of a progress bar a terminal shows what was written last.
        text = re.sub(r"[^\n]*\r(?!\n)", "", done.stdout.decode())
        lines = [line.rstrip() for line in text.strip("\n").replace(str(self.home), "~").splitlines()]
        if done.returncode != int(block.options.get("exit", 0)):
            printed = "\n".join(lines)
            raise CommandFailed(f"line {block.line}: {block.command}\nexit status {done.returncode}\n{printed}")
        return "".join(line + "\n" for line in keep(lines, block.options.get("keep", "")))


def keep(lines: list[str], counts: str) -> list[str]:
    """The first and the last lines of an output; counts are like `3 -5`, or nothing for all."""
    numbers = [int(count) for count in counts.split()]
    first, last = sum(n for n in numbers if n > 0), -sum(n for n in numbers if n < 0)
    if not numbers or len(lines) <= first + last:
        return lines
    return [*lines[:first], "...", *lines[len(lines) - last :]]


def shape(output: str) -> str:
    """What is left of an output if numbers do not count."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*(e[+-]\d+)?", "0", output))


def make(page: Path, wanted: Callable[[Block], bool]) -> None:
    """Run the wanted blocks of a page, and write it with what they print.

    Raises:
        CommandFailed: a command ends with another exit status than the page says.
        OSError: a picture was not made.
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

    with Workspace() as workspace:
        page.write_text(BLOCK.sub(run, page.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run what README.md and docs/*.md run, and write what it prints.")
    parser.add_argument("pages", nargs="*", type=Path, help="by default all")
    parser.add_argument("--fast", action="store_true", help="leave slow commands as they are")
    options = parser.parse_args()
    failed = False
    for page in [path.resolve() for path in options.pages] or pages():
        try:
            make(page, lambda block: block.speed == "fast" or not options.fast)
        except (CommandFailed, OSError) as error:
            failed = True
            print(f"{page.name} is left as it is: {error}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
