"""Puzzles: right answers are accepted, wrong ones get their first difference, and no answer stops the harness."""

import ast
import itertools
import json
import math
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

import create_config
from conformance.worker_pool import WorkerPool
from picotron.command_line import load_config
from picotron.explain.estimate import GIB
from picotron.explain.hardware import fits
from picotron.schedules.actions import AnyAction, Schedule, parse_action
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.simulate import Costs, simulate
from puzzles import __main__ as cli
from puzzles.catalogue import PUZZLES, Puzzle, find
from puzzles.checks import p05_buckets, p09_owner, p14_messages, p16_layout
from puzzles.harness import run
from puzzles.report import Report
from tests.docs.test_docs import anchors, defined_in
from tests.support.puzzle_answers import BEST, OTHERS, WRONG

pytestmark = pytest.mark.processes
each_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerPool]:
    """Processes forked from this one, as by `python -m puzzles`, so that they need not import the checks."""
    pool = WorkerPool(context=multiprocessing.get_context("fork"))
    yield pool
    pool.close()


def untouched(puzzle: Puzzle) -> str:
    """Return the puzzle as it was before anyone solved it: with functions that only raise NotImplementedError."""
    tree = ast.parse(puzzle.path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = ast.parse("raise NotImplementedError").body
    return ast.unparse(tree)


def answer(text: str, puzzle: Puzzle, folder: Path, processes: WorkerPool, limit: float = 30) -> Report:
    path = folder / puzzle.path.name
    path.write_text(text)
    return run(puzzle, path, processes, limit)


def assert_is_picture(text: str) -> None:
    picture = ElementTree.fromstring(text)
    assert picture.tag.endswith("svg")
    assert len(picture) > 2


@each_puzzle
def test_solution_is_right(puzzle: Puzzle, processes: WorkerPool) -> None:
    report = run(puzzle, puzzle.solution, processes, 30)
    assert (report.verdict, report.sentence) == ("RIGHT", "")
    assert_is_picture(report.picture)
    if report.score is not None:
        assert report.score.best <= report.score.value * (1 + 1e-9)
        assert report.score.reached
        reaches_best = report.score.value == pytest.approx(report.score.best, rel=1e-9)
        assert reaches_best or puzzle.number in {number for number, _ in BEST}
        if puzzle.number not in (5, 16):  # whose par is computed from something else than the solution
            assert report.score.value == pytest.approx(report.score.par, rel=1e-9)


@each_puzzle
def test_untouched_puzzle_is_not_done_yet(puzzle: Puzzle, processes: WorkerPool, tmp_path: Path) -> None:
    report = answer(untouched(puzzle), puzzle, tmp_path, processes)
    assert report.verdict == "NOT DONE YET"
    assert re.fullmatch(rf"{puzzle.name}\.py still raises NotImplementedError in line \d+", report.sentence)


# `make test` checks one wrong answer to each puzzle, `make pages` the others.
FIRST_WRONG = {number: i for i, (number, *_) in reversed(list(enumerate(WRONG)))}.values()
SOME_WRONG = [pytest.param(*each, marks=[] if i in FIRST_WRONG else pytest.mark.slow) for i, each in enumerate(WRONG)]


def test_every_puzzle_has_two_wrong_answers() -> None:
    assert {number for number, *_ in WRONG} == {puzzle.number for puzzle in PUZZLES}
    assert all(sum(number == puzzle.number for number, *_ in WRONG) >= 2 for puzzle in PUZZLES)


@pytest.mark.parametrize(("number", "old", "new", "verdict", "sentence"), SOME_WRONG, ids=lambda value: str(value)[:20])
def test_wrong_answer_gets_its_first_difference(
    number: int, old: str, new: str, verdict: str, sentence: str, processes: WorkerPool, tmp_path: Path
) -> None:
    puzzle = PUZZLES[number - 1]
    text = puzzle.solution.read_text()
    assert old in text
    report = answer(text.replace(old, new), puzzle, tmp_path, processes)
    assert report.verdict == verdict, report
    assert re.search(sentence, report.sentence), report.sentence
    assert "\n" not in report.sentence


@pytest.mark.slow
@pytest.mark.parametrize(("number", "text"), OTHERS, ids=lambda value: str(value)[:3])
def test_other_correct_answers_are_right(number: int, text: str, processes: WorkerPool, tmp_path: Path) -> None:
    report = answer(text, PUZZLES[number - 1], tmp_path, processes)
    assert (report.verdict, report.sentence) == ("RIGHT", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "text"), BEST, ids=lambda value: str(value)[:3])
def test_best_known_score_is_reached(number: int, text: str, processes: WorkerPool, tmp_path: Path) -> None:
    report = answer(text, PUZZLES[number - 1], tmp_path, processes)
    assert (report.verdict, report.sentence) == ("RIGHT", "")
    assert report.score is not None
    assert report.score.value == pytest.approx(report.score.best, rel=1e-9)


def test_statement_of_puzzle_9_tells_its_score_of_contiguous_chunks() -> None:
    work = p09_owner.pairs([chunk // 2 for chunk in range(8)], 4)
    text = PUZZLES[8].path.read_text()
    assert f"{max(work) * 4 / sum(work):.3f}" in text
    assert f"{p09_owner.TOKENS} tokens" in text


@pytest.mark.slow
def test_best_known_layout_of_puzzle_16_is_that_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--exp_name best --out_dir {tmp_path} --config docs/seventy_billion.json --model.name {p16_layout.MODEL}"
    words += f" --training.seq_length {p16_layout.TOKENS} --world_size {p16_layout.GPUS}"
    words += f" --global_batch_size {p16_layout.SEQUENCES} --hardware H100 --best 1"
    create_config.main(words.split())
    (found,) = tmp_path.glob("best/**/config.json")
    fastest = p16_layout.estimate(load_config(["--config", str(found)]))[1].step_time
    assert p16_layout.estimate(p16_layout.config_of(p16_layout.layout()))[1].step_time == fastest


def test_layout_in_the_statement_of_puzzle_16_is_the_one_that_sets_par() -> None:
    text = " ".join((ast.get_docstring(ast.parse(PUZZLES[15].path.read_text()).body[-1]) or "").split())  # type: ignore[arg-type]
    assert json.loads(text[text.index("{") : text.index("}") + 1].replace("True", "true")) == p16_layout.GIVEN
    assert f"Par is {1 - p16_layout.PAR:.0%}".replace("%", " %") in text
    memories, _ = p16_layout.estimate(p16_layout.config_of(p16_layout.GIVEN))
    assert fits(max(memory.total for memory in memories) / GIB, p16_layout.GPU.gib)


@pytest.mark.parametrize(("p", "m", "p2p"), [(2, 8, 2.0), (3, 12, 0.4), (4, 16, 1.0)])
def test_par_of_puzzle_14_is_the_least_of_all_warm_ups(p: int, m: int, p2p: float) -> None:
    """Compares with schedules that run a backward and a forward in turn, after any number of forwards on each rank."""

    def program(rank: int, warmup: int) -> list[AnyAction]:
        names = [f"F{i}" for i in range(warmup)]
        for i in range(m):
            names += [f"B{i}"] + [f"F{i + warmup}"] * (i + warmup < m)
        return [parse_action(f"{rank}{name}") for name in names]

    costs, found = Costs(p2p=p2p), list[int]()
    limit = simulate(build("afab", p, m), costs).step_time * (1 + 1e-9)
    for warmups in itertools.product(range(1, 9), repeat=p):
        if list(warmups) == sorted(warmups, reverse=True) and sum(warmups) < min(found, default=99):
            schedule = Schedule([program(rank, warmup) for rank, warmup in enumerate(warmups)], m)
            if simulate(schedule, costs).step_time <= limit:
                found.append(sum(warmups))
    assert found[-1] == sum(1 + math.ceil(1 + 2 / 3 * p2p) * (p - 1 - rank) for rank in range(p))
    assert found[-1] == p14_messages.PAR or (p, m, p2p) != p14_messages.CASES[-1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_with_a_name_solves_puzzle_14(name: str, processes: WorkerPool, tmp_path: Path) -> None:
    text = f"""
from picotron.schedules.schedules import build

def program(rank, p, m, p2p):
    return [str(action) for action in build({name!r}, p, m).programs[rank]]
"""
    assert answer(text, PUZZLES[13], tmp_path, processes).verdict in ("WRONG", "OVER PAR")


@pytest.mark.parametrize("latency", [0.0, 0.5, 2.0])
def test_best_buckets_of_puzzle_5_are_the_best_of_all(latency: float) -> None:
    """Compares with all ways to put five gradients into buckets, in any order."""
    case = p05_buckets.Case([1.0, 1.5, 3.0, 3.2, 5.0], [2, 1, 4, 1, 3], latency, 2.0)
    ends = []
    for numbers in itertools.product(range(5), repeat=5):  # the bucket of each gradient
        buckets = [[i for i in range(5) if numbers[i] == number] for number in range(5)]
        ends.append(p05_buckets.end([bucket for bucket in buckets if bucket], case))
    assert p05_buckets.earliest(case) == pytest.approx(min(ends))
    assert p05_buckets.best_with_limit(case) >= min(ends)


# ------------------------------------------------------------------------------------------------- answers that fail

FIRST = "def all_reduce(x, group):\n"
FAILURES = [
    (FIRST + "    while True: pass\n", "HANGS", r"still running after 0.5 s: ranks 0, 1 and 2 are in line 2, `while True: pass`$"),
    (FIRST + "    if group.rank == 1:\n        return x\n    return group.reduce_scatter(x)\n", "ERROR", "rank 0 calls reduce_scatter of shape .6,., but rank 1 has returned"),
    (FIRST + "    return group.all_gather(x[: 1 + group.rank])\n", "ERROR", "line 2, .*shape .1,., but rank 1 calls all_gather of shape .2,.; all ranks must"),
    (FIRST + "    return x +\n", "ERROR", r"p01_all_reduce.py, line 2: SyntaxError: invalid syntax$"),
    ("import torhc\n", "ERROR", "line 1, `import torhc`: ModuleNotFoundError: No module named 'torhc'"),
    (FIRST + "    return 1 / len(x[:0])\n", "ERROR", "line 2, `return 1 / len.*`: ZeroDivisionError: division by zero"),
    (FIRST + "    if group.rank:\n        return group.all_gather(x)\n    raise KeyError('w')\n", "ERROR", "rank 0 of 3: .*line 4, `raise KeyError.*: KeyError: 'w'"),
    ("def all_sum(x, group):\n    return x\n", "ERROR", "p01_all_reduce.py has no function all_reduce"),
    ("def all_reduce(x):\n    return x\n", "ERROR", r"all_reduce\(\) takes 1 positional argument but 2 were given"),
    ("import sys\nsys.exit(2)\n", "ERROR", "line 2, `sys.exit.2.`: SystemExit: 2"),
    ("import os\nos._exit(0)\n", "ERROR", "has ended its process"),
    (FIRST + "    return group.all_reduce(x)\n", "ERROR", "solve this puzzle without group.all_reduce"),
    (FIRST + "    return group.all_gather(x.float())\n", "ERROR", "all_gather takes a tensor in float64, but got a tensor of shape .6,., float32"),
    (FIRST + "    return x.tolist()\n", "WRONG", "result should be a tensor of shape .6,., float64, but is list .1.0, 2.0"),
    (FIRST + "    return all_reduce(x, group)\n", "ERROR", "RecursionError: maximum recursion depth exceeded"),
    (FIRST + "    return x.new_zeros(2**30)\n", "ERROR", "line 2, `return x.new_zeros.2\\*\\*30.`: RuntimeError: .*memory"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "verdict", "sentence"),
    [pytest.param(*each, marks=[] if i < 8 else pytest.mark.slow) for i, each in enumerate(FAILURES)],
)
def test_failure_is_one_sentence(text: str, verdict: str, sentence: str, processes: WorkerPool, tmp_path: Path) -> None:
    report = answer(text, PUZZLES[0], tmp_path, processes, limit=0.5 if verdict == "HANGS" else 30)
    assert report.verdict == verdict, report
    assert re.search(sentence, report.sentence), report.sentence
    assert "\n" not in report.sentence


def test_output_of_an_answer_is_printed(
    processes: WorkerPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = FIRST + "    print(f'I am rank {group.rank}')\n    while True:\n        pass\n"
    assert answer(loop, PUZZLES[0], tmp_path, processes, limit=0.5).verdict == "HANGS"
    assert sorted(capfd.readouterr().out.splitlines()) == ["I am rank 0", "I am rank 1", "I am rank 2"]


def test_message_without_a_receiver_or_sender_is_found(processes: WorkerPool, tmp_path: Path) -> None:
    waits = "def ring_all_reduce(x, group):\n    return group.receive((group.rank + 1) % 3)\n"
    report = answer(waits, PUZZLES[1], tmp_path, processes, limit=0.5)
    assert report.verdict == "HANGS"
    where = "ranks 0, 1 and 2 wait in line 2, `return group.receive((group.rank + 1) % 3)`"
    assert report.sentence == f"still running after 0.5 s: {where}"
    sends = "def ring_all_reduce(x, group):\n    group.send(x, (group.rank + 1) % 3)\n    return x\n"
    report = answer(sends, PUZZLES[1], tmp_path, processes)
    expected = "p02_ring.py: a message was not received: 1 sent by rank 0, 0 received by rank 1; with x = tensor([1, ..., 6]) * 100**rank"
    assert (report.verdict, report.sentence) == ("ERROR", expected)


# ------------------------------------------------------------------------------------------------------- command line


def test_list_shows_what_is_solved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([], tmp_path) == 0
    assert "0 of 16 solved" in capsys.readouterr().out
    (tmp_path / "progress.json").write_text(json.dumps({"p02_ring": {"solved": True, "text": "sent 1.500"}}))
    cli.main([], tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"2 +collectives +an all-reduce on a ring +docs/\S+ +solved  sent 1.500", lines[2])
    assert "1 of 16 solved" in lines[-1]
    for damaged in ("{", "[1]", '{"p02_ring": true}'):
        (tmp_path / "progress.json").write_text(damaged)
        cli.main([], tmp_path)
        assert "0 of 16 solved" in capsys.readouterr().out


def test_check_prints_and_remembers_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    puzzle = PUZZLES[12]
    monkeypatch.setattr(Puzzle, "path", property(lambda self: tmp_path / f"{self.name}.py"))
    puzzle.path.write_text(puzzle.solution.read_text())
    assert cli.main(["13"], tmp_path) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "RIGHT: puzzle 13, a smaller bubble than 1F1B"
    assert output[1] == "score: bubble 17.2 % (par 17.2 %, best known 11.1 %)"
    assert output[2] == f"see {tmp_path}/p13_bubble.svg and {tmp_path}/p13_bubble.csv"
    assert output[3] == f"in picotron: {puzzle.place}"
    assert output[4] == "next: puzzles/p14_messages.py, after docs/pipeline_parallel.md"
    assert_is_picture((tmp_path / "p13_bubble.svg").read_text())
    puzzle.path.write_text(puzzle.solution.read_text().replace("range(M - rank, M)", "range(M)"))
    assert cli.main(["p13"], tmp_path) == 1
    assert capsys.readouterr().out.startswith("WRONG: puzzle 13, a smaller bubble than 1F1B\np = 4, m = 8: pp rank 0 ")
    known = json.loads((tmp_path / "progress.json").read_text())["p13_bubble"]
    assert known["solved"]
    assert known["text"] == "bubble 17.2 %"


def test_hints_come_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (1, 2, 3, 3):
        assert cli.main(["2", "--hint"], tmp_path) == 0
        lines = capsys.readouterr().out.splitlines()
        hints = [line.split(":")[0] for line in lines if line.startswith("hint ")]
        assert hints == [f"hint {i} of 3" for i in range(1, shown + 1)]
        assert lines[-1] == f"to read: {PUZZLES[1].page}"


def test_solution_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["9", "--solution"], tmp_path) == 0
    assert capsys.readouterr().out == PUZZLES[8].solution.read_text()


@pytest.mark.parametrize("text", ["0", "17", "-1", "mlp", "p7x", "1.0"])
def test_unknown_puzzle_gets_one_sentence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([text], tmp_path) == 2
    assert capsys.readouterr().err == f"error: there is no puzzle {text!r}; choose a number from 1 to 16\n"


ADAPTER = """
from other_package import send_to_everyone as p02_ring

def p09_owner(chunk, cp):
    return min(chunk, 2 * cp - 1 - chunk)

def p03_place(sample, B, m, dp):
    return sample
"""
OTHER_PACKAGE = """
def send_to_everyone(x, group):
    others = [rank for rank in range(group.size) if rank != group.rank]
    for rank in others:
        group.send(x, rank)
    return x + sum(group.receive(rank) for rank in others)
"""


def test_adapter_is_checked_function_by_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = tmp_path / "course.py"
    adapter.write_text(ADAPTER)
    (tmp_path / "other_package.py").write_text(OTHER_PACKAGE)
    assert cli.main(["--adapter", str(adapter)], tmp_path) == 1
    output = capsys.readouterr().out
    rows = {line.split()[1]: re.split("  +", line)[2:] for line in output.splitlines()[1:17]}
    assert rows.pop("p02_ring") == ["over par", "sent by the busiest of 4 ranks, divided by the size of x: 3.000"]
    assert rows.pop("p03_place") == ["wrong"]
    assert rows.pop("p09_owner") == ["right", "work of the busiest of 4 ranks / mean: 1.000"]
    assert {tuple(row) for row in rows.values()} == {("not offered",)}
    assert "\n1 of 3 offered functions are right.\n" in output
    assert re.search(r"^p03_place: place\(0, .*int 0$", output, re.MULTILINE)
    assert not (tmp_path / "progress.json").exists()


def test_adapter_is_checked_for_one_puzzle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = tmp_path / "course.py"
    adapter.write_text(PUZZLES[6].solution.read_text() + "\np07_mlp = parallel_mlp\n")
    assert cli.main(["7", "--adapter", str(adapter)], tmp_path) == 0
    assert capsys.readouterr().out.startswith("RIGHT: puzzle 7, ")
    assert cli.main(["1", "--adapter", str(adapter)], tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[1] == "course.py has no function p01_all_reduce"
    assert cli.main(["--adapter", str(tmp_path / "none.py")], tmp_path) == 2


def test_adapter_without_functions_is_not_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = tmp_path / "course.py"
    adapter.write_text("")
    assert cli.main(["--adapter", str(adapter)], tmp_path) == 1
    assert "0 of 0 offered functions are right." in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- catalogue


@each_puzzle
def test_place_in_picotron_exists(puzzle: Puzzle) -> None:
    file, symbol, *_ = puzzle.place.split()
    assert symbol in defined_in(Path(file))
    assert puzzle.place.endswith(".")


def test_puzzles_are_numbered_and_complete() -> None:
    assert [puzzle.number for puzzle in PUZZLES] == list(range(1, len(PUZZLES) + 1))
    for folder in ("", "checks/", "solutions/"):
        files = {path.stem for path in Path("puzzles", folder).glob("p*.py")} - {"pictures"}
        assert files == {puzzle.name for puzzle in PUZZLES}
    assert [find(text) for text in ("7", "07", "p07", "p07_mlp")] == [PUZZLES[6]] * 4


@each_puzzle
def test_statement_names_title_page_and_command(puzzle: Puzzle) -> None:
    text = ast.get_docstring(ast.parse(puzzle.path.read_text()))
    assert text is not None
    assert text.startswith(f"Puzzle {puzzle.number}, {puzzle.topic}: {puzzle.title}.\n")
    assert f"`python -m puzzles {puzzle.number}`" in text
    page, _, anchor = puzzle.page.partition("#")
    assert page in text
    assert anchor in anchors(Path(page))
    for section in re.findall(r'"([^"]+)"', text.replace("\n", " ")):
        title = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
        assert any(each.startswith(title) for each in anchors(Path(page))), section
