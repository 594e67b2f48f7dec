"""The budget of the trainer that one reads, and of each other room. Its numbers only fall: see CONTRIBUTING.md."""

import ast
import json
from pathlib import Path

import pytest

from docs.programs import make, reading_path
from tests.support.program import run
from tests.support.traced_step import code_tokens

# Code tokens of each room: no comments, docstrings or layout, so that nobody saves by cramming. Programs that stand on
# pages are of docs/; the programs of the root have names that end in .py.
TOKENS = {
    "benchmarks": 13_599,
    "conformance": 43_795,
    "create_config.py": 2_127,
    "docs": 27_121,
    "examples": 6_966,
    "extract_metrics.py": 19,
    "generate.py": 31,
    "picotron": 22_547,
    "playground": 5_961,
    "puzzles": 23_824,
    "steps": 14_609,
    "submit_slurm_jobs.py": 1_376,
    "tests": 141_028,
    "train.py": 1_416,
    "workbench": 122_603,
}
FILES = 28  # files of picotron/
STEP = {"functions": 118, "files": 20, "lines": 610}  # that a warm step of pp 2 x cp 2 x tp 2 runs, over all ranks
PATH_LINES = 647  # of `python -m docs.programs.reading_path --code`, without those between the pieces


def sources(room: str) -> list[str]:
    if room.endswith(".py"):
        return [Path(room).read_text()]
    pages = make.pages() if room == "docs" else []
    programs = [program for page in pages for _, program in make.PROGRAM.findall(page.read_text())]
    return programs + [path.read_text() for path in Path(room).rglob("*.py")]


def test_each_room_has_a_budget() -> None:
    assert {*TOKENS} == {path.parts[0] for path in Path().glob("[!.]*/**/*.py")} | {
        path.name for path in Path().glob("*.py")
    }


@pytest.mark.parametrize("room", TOKENS)
def test_a_room_stays_as_small_as_it_is(room: str) -> None:
    assert sum(len(code_tokens(source)) for source in sources(room)) <= TOKENS[room]
    assert room != "picotron" or len(sources(room)) <= FILES


PIECES = [piece for pieces in reading_path.parts().values() for piece in pieces]
LEFT_OUT = " ".join(reading_path.LEFT_OUT.values()).split()


def test_the_reading_path_is_short() -> None:
    assert sum(piece.text().count("\n") + 1 for piece in PIECES) <= PATH_LINES
    ast.parse("\n".join(reading_path.code()))


@pytest.mark.processes
def test_a_step_runs_no_more_code_than_it_does(tmp_path: Path) -> None:
    """Each of its functions is in the reading path or left out there."""
    out = tmp_path / "step.json"
    run("-m", "tests.support.traced_step", out, "--checkpoint.save_dir", tmp_path / "run")
    step = json.loads(out.read_text())
    ran = [(file, name) for file, found in step.items() for name in found["functions"]]
    found = {"functions": len(ran), "files": len(step), "lines": sum(each["lines"] for each in step.values())}
    assert min(found.values()) > 0
    assert {name: number for name, number in found.items() if number > STEP[name]} == {}

    def is_left_out(file: str, name: str) -> bool:
        return any(each in (name, name.rpartition(".")[2]) or file.startswith(each) for each in LEFT_OUT)

    def is_shown(file: str, name: str) -> bool:
        return any(file == each.file and f"{name}.".startswith(f"{each.name}.") for each in PIECES)

    assert [each for each in ran if not is_shown(*each) and not is_left_out(*each)] == []


def test_the_reading_path_defines_each_name_before_it_is_used() -> None:
    """A name of picotron/ in the code of a piece is one of a piece above it, of itself, or left out."""
    modules = [ast.parse(path.read_text()) for path in Path("picotron").rglob("*.py")]
    project = {name for module in modules for node in module.body for name in reading_path.names_of(node)} - {""}
    defined, undefined = {each.rpartition(".")[2] for each in LEFT_OUT}, []
    for piece in PIECES:
        nodes = [*ast.walk(piece.node)]
        defined |= {piece.name.rpartition(".")[2], *(node.name for node in nodes if isinstance(node, ast.FunctionDef))}
        methods = {each.name.rpartition(".")[2] for each in PIECES if "." in each.name}
        hints = {id(part) for node in nodes for hint in annotations(node) for part in ast.walk(hint)}
        for node in nodes:
            used = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            known = project if isinstance(node, ast.Name) else methods - {"forward", "backward", "step"}
            if used in known and used not in defined and id(node) not in hints:
                undefined.append((piece.name, used))
    assert undefined == []


def annotations(node: ast.AST) -> list[ast.expr]:
    return [each for each in (getattr(node, "annotation", None), getattr(node, "returns", None)) if each]
