"""The benchmarks: each runs with a tiny workload, prints its tables, and compares programs that compute the same."""

import contextlib
import io
import multiprocessing.connection
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.side_by_side import DifferentResults, Measurement, check_same_losses, commit
from benchmarks.torch_pipeline import TORCH_CLASSES
from conformance.worker_pool import CONTEXT

Table = list[list[str]]

CP_ENGINES = ["cp 2, ring, zigzag", "cp 2, ring, contiguous", "cp 2, all_gather, zigzag", "cp 2, ulysses, zigzag"]
TP_LAYOUTS = ["tp 1", "tp 2", "tp 2, sequence parallel", "tp 4", "tp 4, sequence parallel"]
GENERATION = ["picotron", "picotron, pp 2"]
ROWS = {  # of each table that a program prints: the first column
    "single": [["transformers", "picotron"]],
    "data_parallel": [
        ["transformers, DistributedDataParallel", "picotron, DataParallelBucket", "picotron, DataParallelNaive"]
    ],
    "sharding": [
        ["transformers, DistributedDataParallel, ZeroRedundancyOptimizer", "picotron, bucket", "picotron, zero1"],
        ["transformers, fully_shard", "picotron, bucket", "picotron, zero3"],
    ],
    "tensor_parallel": [
        TP_LAYOUTS,
        TP_LAYOUTS,
        ["torch, tensor and loss parallel", "picotron", "torch, tensor parallel"],
        ["torch, tensor and loss parallel, + sequence parallel", "picotron, + sequence parallel"],
    ],
    "pipeline": [["afab", "1f1b"], ["afab"] * 4 + ["1f1b"] * 4],
    "schedules": [[*TORCH_CLASSES], [name for name in TORCH_CLASSES for _ in range(4)]],
    "context_parallel": [
        ["2", "4", "8"],
        ["1", "2", "2", "2", "4", "4", "4"],
        ["one process, 2 threads", *CP_ENGINES],
        ["one process, 2 threads", *CP_ENGINES],
    ],
    "checkpoint": [
        [f"{layout}, {name}" for layout in ("dp 1", "tp 2", "pp 2") for name in ("save", "load")],
        ["dp 1", "tp 2", "pp 2"],
    ],
    "packing": [
        ["transformers, padded to the longest of the micro-batch", "picotron, a sample per row", "picotron, packed"]
    ],
    "generation": [
        ["transformers, 8 prompts", *GENERATION],
        ["transformers, 32 prompts", *GENERATION],
        ["8"] * 3 + ["32"] * 3,
    ],
    "forecast_here": [
        [
            *("one process", "one process, micro-batches of 4", "one process, recomputation"),
            *("dp 2", "dp 2, zero1", "dp 2, zero3", "tp 2", "tp 2, sequence parallelism", "cp 2"),
            *("pp 2, 1f1b", "pp 2, interleaved_1f1b", "pp 2, zbv"),
        ]
    ],
}
OTHERS = {"tokens", "forecast", "roofline"}  # below, in test_forecast.py, and in test_roofline.py
MEASURED = r"\n\nMeasured at (commit [0-9a-f]{7,} \(\d{4}-\d\d-\d\d\)( \+ changes)?|unknown commit); .*; torch .*\.\n"


def serve(connection: multiprocessing.connection.Connection) -> None:
    """Run programs as `python -m benchmarks.NAME ...` does: receive the name and the arguments, and send whether the
    program succeeded, and its output or its traceback.
    """
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:  # the tests are over
            return
        sys.argv = [name, *arguments]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
            connection.send((True, output.getvalue()))
        except BaseException:
            connection.send((False, traceback.format_exc()))


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., str]]:
    """Function that runs a benchmark and returns its output. One process runs all of them, so it imports torch once."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs,))  # not a daemon, because it starts processes
    process.start()
    theirs.close()

    def run_benchmark(*arguments: str) -> str:
        ours.send(arguments)
        assert ours.poll(240), "no output within 240 s"
        succeeded, output = ours.recv()
        assert succeeded, output
        return output

    yield run_benchmark
    ours.close()
    process.kill()
    process.join()


def tables(text: str) -> list[Table]:
    """Return the cells of each Markdown table, without the header."""
    found = re.findall(r"^\|.*\n\|(?:---\|)+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in rows.splitlines()] for rows in found]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_benchmark_prints_all_rows_of_its_tables(run: Callable[..., str], name: str) -> None:
    """A program that compares two trainers fails if their losses differ."""
    output = run(name, "--tiny")
    found = tables(output)
    assert [[row[0] for row in table] for table in found] == ROWS[name]
    assert len(re.findall(r"\|" + MEASURED, output)) == len(found)
    if name == "tensor_parallel":
        for table in found[:2]:
            for _, counted, formula, *_ in table:  # in MiB, with two digits
                assert float(counted) == pytest.approx(float(formula), abs=0.011)
    elif name == "context_parallel":
        for cp, zigzag, contiguous, formula in found[0]:
            assert (float(zigzag), contiguous, float(cp)) == (1, formula, pytest.approx(1 / (2 - float(formula)), 0.01))


@pytest.mark.slow
def test_tokens_prints_a_row_per_file_and_number_of_processes(run: Callable[..., str]) -> None:
    output = run("tokens", "--tiny")
    ((alone, *rows),) = tables(output)
    assert alone[0] == "tokenizer alone"
    assert {row[0].partition(", num_proc ")[0] for row in rows} == {"picotron, .txt", "picotron, .jsonl"}
    assert re.search(r"\|" + MEASURED, output)


def test_every_benchmark_has_a_test() -> None:
    programs = {path.stem for path in Path("benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert programs == ROWS.keys() | OTHERS
    of_make = set(re.findall(r"-m benchmarks\.(\w+)", Path("Makefile").read_text()))
    assert programs - of_make == {"forecast", "forecast_here", "roofline"}  # docs/reference/benchmarks.md says so


PAGE, FORECASTS = Path("docs/reference/benchmarks.md"), Path("docs/reference/forecasts.md")
SUMMARY = "| comparison | relative speed | relative memory |"


def test_every_measured_table_has_its_commit() -> None:
    for page, expected in {PAGE: 14, FORECASTS: 1, **dict.fromkeys(Path("benchmarks/results").glob("*.md"), 1)}.items():
        found = re.findall(r"^(\|.*)\n\|(?:---\|)+\n(?:\|.*\n)+\n?(.*)\n", page.read_text(), re.MULTILINE)
        measured = [after for header, after in found if header != SUMMARY]
        assert len(measured) >= expected, page
        assert all(line.startswith("Measured at commit ") for line in measured), (page, measured)


def test_summary_of_the_page_repeats_its_tables() -> None:
    """Each ratio of the first table is a cell of a table in the section that its row links to."""
    page = PAGE.read_text()
    sections = {
        title.lower().replace(" ", "-"): {cell for table in tables(text) for row in table for cell in row}
        for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, re.MULTILINE)
    }
    summary = tables(page)[0]
    assert len(summary) >= 7
    for comparison, *ratios in summary:
        anchor = re.findall(r"\(#([^)]*)\)", comparison)[0]
        numbers = re.findall(r"\d\.\d\d", " ".join(ratios))
        assert len(numbers) >= 2
        assert set(numbers) <= sections[anchor], comparison


# ------------------------------------------------------------------------------------------------------ side by side


def measurement(*losses: float) -> Measurement:
    return Measurement([1.0], 1.0, list(losses))


def test_different_losses_of_either_of_the_first_two_steps_are_an_error() -> None:
    same = {"theirs": measurement(5.0, 4.0, 3.0), "ours": measurement(5.00002, 4.0, 2.0)}
    check_same_losses(same)
    with pytest.raises(DifferentResults, match=r"step 1: 5.000000 \(theirs\), 5.010000 \(ours\)"):
        check_same_losses(same | {"ours": measurement(5.01, 4.0)})
    with pytest.raises(DifferentResults, match="step 2: 4"):
        check_same_losses(same | {"ours": measurement(5.0, 4.01)})


@pytest.mark.processes
def test_commit_names_the_last_commit_and_whether_files_have_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def described(folder: Path = tmp_path) -> str:
        commit.cache_clear()
        return commit(folder)

    assert described() == "unknown commit"
    git("init")
    assert described() == "unknown commit"
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "A message", "--date", "2026-01-31T12:00:00")
    head = git("rev-parse", "--short", "HEAD")
    assert re.fullmatch(rf"commit {head} \(\d{{4}}-\d\d-\d\d\)", described())
    (tmp_path / "file").write_text("b")
    assert described().endswith(") + changes")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "file").write_text("of another project")
    assert described(tmp_path / "copy") == "unknown commit"
