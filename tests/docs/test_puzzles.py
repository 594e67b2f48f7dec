"""Puzzles: solutions are right, wrong answers get their first difference in a sentence, and none stops the harness."""

import json
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.worker_pool import WorkerPool
from docs.site.pages import Checkout, Page
from puzzles import __main__ as cli
from puzzles.catalogue import PUZZLES, Puzzle, find
from puzzles.harness import run
from puzzles.report import Report
from tests.support import program
from tests.support.puzzle_answers import FAILURES, FIRST, WRONG
from workbench.run.start_method import START_METHOD

pytestmark = pytest.mark.processes
BY_NUMBER = {puzzle.number: puzzle for puzzle in PUZZLES}
each_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerPool]:
    """Processes forked from this one, as by `python -m puzzles`, so that they need not import the checks."""
    pool = WorkerPool(context=multiprocessing.get_context(START_METHOD))
    yield pool
    pool.close()


def answer(text: str, puzzle: Puzzle, folder: Path, processes: WorkerPool, limit: float = 30) -> Report:
    path = folder / puzzle.path.name
    path.write_text(text)
    return run(puzzle, path, processes, limit)


def assert_report(report: Report, verdict: str, sentence: str) -> None:
    assert report.verdict == verdict, report
    assert re.search(sentence, report.sentence), report.sentence
    assert "\n" not in report.sentence


@each_puzzle
def test_solution_is_right(puzzle: Puzzle, processes: WorkerPool) -> None:
    report = run(puzzle, puzzle.solution, processes, 30)
    assert (report.verdict, report.sentence) == ("RIGHT", "")
    assert ElementTree.fromstring(report.picture).tag.endswith("svg")
    if report.score is not None:
        assert report.score.best <= report.score.value * (1 + 1e-9)
        if puzzle.number not in (8, 11, 13, 19):  # whose best known answer is another one
            assert report.score.value == pytest.approx(report.score.best, rel=1e-9)
        if puzzle.number not in (5, 16):  # whose par is computed from something else than the solution
            assert report.score.value == pytest.approx(report.score.par, rel=1e-9)


@pytest.mark.parametrize(("number", "old", "new", "verdict", "sentence"), WRONG, ids=lambda value: str(value)[:20])
def test_wrong_answer_gets_its_first_difference(
    number: int, old: str, new: str, verdict: str, sentence: str, processes: WorkerPool, tmp_path: Path
) -> None:
    puzzle = BY_NUMBER[number]
    text = puzzle.solution.read_text()
    assert old in text
    assert_report(answer(text.replace(old, new), puzzle, tmp_path, processes), verdict, sentence)


@pytest.mark.parametrize(("before", "body", "verdict", "sentence"), FAILURES)
def test_failure_is_one_sentence(
    before: str, body: str, verdict: str, sentence: str, processes: WorkerPool, tmp_path: Path
) -> None:
    limit = 0.5 if verdict == "HANGS" else 30
    text = FIRST.replace("def", f"{before}def") + f"    {body}"
    assert_report(answer(text, PUZZLES[0], tmp_path, processes, limit), verdict, sentence)


# ------------------------------------------------------------------------------------------------------- command line


def test_check_prints_and_remembers_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    puzzle = BY_NUMBER[13]
    monkeypatch.setattr(Puzzle, "path", property(lambda self: tmp_path / f"{self.name}.py"))
    puzzle.path.write_text(puzzle.solution.read_text())
    assert cli.main(["13"], tmp_path) == 0
    assert capsys.readouterr().out.startswith("RIGHT: puzzle 13")
    puzzle.path.write_text(puzzle.solution.read_text().replace("range(M - rank, M)", "range(M)"))
    assert cli.main(["p13"], tmp_path) == 1
    assert json.loads((tmp_path / "progress.json").read_text())["p13_bubble"]["solved"]


def test_adapter_is_checked_function_by_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the course is
    adapter = tmp_path / "course.py"
    mine = "def p09_owner(chunk, cp):\n    return min(chunk, 2 * cp - 1 - chunk)\n"
    layout = "from puzzles.solutions.p16_layout import layout as p16_layout\n"  # whose check reads files
    adapter.write_text(f"from other import place as p03_place\n{layout}\n{mine}")
    (tmp_path / "other.py").write_text("def place(sample, B, m, dp):\n    return sample\n")
    assert cli.main(["--adapter", str(adapter)], tmp_path) == 1
    output = capsys.readouterr().out
    verdicts = {line.split()[1]: re.split("  +", line)[2] for line in output.splitlines()[1:23]}
    found = [verdicts.pop(name) for name in ("p03_place", "p09_owner", "p16_layout")]
    assert found == ["wrong", "right", "right"]
    assert set(verdicts.values()) == {"not offered"}
    assert cli.main(["9", "--adapter", str(adapter)], tmp_path) == 0


@pytest.mark.parametrize(("words", "folder"), [("puzzles 1 --hint", "runs"), ("docs.site.build", "site")])
def test_a_clone_that_cannot_be_written_is_a_sentence(words: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).touch()  # in place of a folder
    start = (
        f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_module({words.split()[0]!r}, run_name='__main__')"
    )
    done = program.run("-c", start, *words.split()[1:], code=1, PYTHONPATH=str(Path.cwd()))
    assert re.fullmatch(rf"error: {folder}.*: Not a directory; work in a clone .*\n", done.stderr)


def test_most_puzzles_need_only_torch() -> None:
    """`make steps` installs no more, except for NumPy. Puzzles 3, 6 and 16 use the trainer's own code."""
    imports = (
        "import importlib, sys; import torch.distributed\n"
        "sys.modules.update(dict.fromkeys(['datasets', 'pydantic', 'safetensors', 'tokenizers', 'transformers']))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    checks = [f"puzzles.checks.{puzzle.name}" for puzzle in PUZZLES if puzzle.number not in (3, 6, 16)]
    program.run("-c", imports, "puzzles.harness", *checks)


def test_puzzles_are_numbered_and_complete() -> None:
    assert sorted(BY_NUMBER) == list(range(1, len(PUZZLES) + 1))
    assert [find(text) for text in ("7", "07", "p07", "p07_mlp")] == [BY_NUMBER[7]] * 4
    for puzzle in PUZZLES:
        file, symbol, *_ = puzzle.place.split()
        assert re.search(rf"(class |def |^){symbol.split('.')[-1]}\b", Path(file).read_text(), re.MULTILINE), (
            puzzle.place
        )
        page, _, anchor = puzzle.page.partition("#")
        assert anchor in {part[2] for part in Page(page, [], Checkout("", ""), {}).parts}
        assert f"`python -m puzzles {puzzle.number}`" in puzzle.path.read_text()


def test_puzzles_and_pages_have_one_order() -> None:
    """The table of README.md has the puzzles of each page, in the order in which `python -m puzzles` lists them."""
    listed = []
    for row in re.findall(r"^\| \[.*\|$", Path("README.md").read_text(), re.MULTILINE):
        for name in re.findall(r"\]\(puzzles/(p\w+)\.py\)", row):
            puzzle = find(name)
            assert puzzle is not None
            assert f"]({puzzle.page.partition('#')[0]})" in row
            listed.append(puzzle)
    assert listed == PUZZLES
