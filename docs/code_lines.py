"""Numbers of lines in a page: of what its links point to, and of files.

[`Llama.forward`](../picotron/model.py#L120)    the line of that definition
| [train.py](train.py) | 159 | ...              how many lines it has, and below a table of those,
| together | 1,432 | ...                        their sum
"""

import ast
import re
from pathlib import Path

CODE_LINK = re.compile(r"\[`(?P<name>[\w.]+(?<!\.py))`\]\((?P<file>[^)#\s]+\.py)(?:#L\d+)?\)")
LINES_OF = re.compile(r"^\| \[[^\]]*\]\((?P<file>[^)]*)\) \| [\d,]* \|")
LINES_TOGETHER = re.compile(r"^\| together \| [\d,]* \|")


def line_of(name: str, file: Path) -> int:
    """The line where a class, function, method or constant is defined, by its dotted name. LookupError if none is."""
    node: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        found = [inner for inner in getattr(node, "body", []) if part in _defines(inner)]
        if not found:
            raise LookupError(f"{file} defines no {name}")
        node = found[0]
    return node.lineno


def _defines(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [getattr(node, "name", "")]


def with_lines(text: str, page: Path) -> str:
    """A page whose links into the code have the right lines, and whose tables of files the right counts."""

    def link(match: re.Match[str]) -> str:
        return f"[`{match['name']}`]({match['file']}#L{line_of(match['name'], page.parent / match['file'])})"

    lines, sum_of_lines = CODE_LINK.sub(link, text).split("\n"), 0
    for i, line in enumerate(lines):
        if match := LINES_OF.match(line):
            count = len((page.parent / match["file"]).read_text().splitlines())
            sum_of_lines += count
            lines[i] = re.sub(r"\) \| [\d,]* \|", f") | {count} |", line, count=1)
        elif LINES_TOGETHER.match(line):
            lines[i], sum_of_lines = LINES_TOGETHER.sub(f"| together | {sum_of_lines:,} |", line), 0
    return "\n".join(lines)
