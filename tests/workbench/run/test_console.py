"""Programs whose output nobody reads any more finish their work."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run(words: list[object], stdout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=240, check=False)


def test_programs_finish_without_a_reader(tmp_path: Path, closed_pipe: int) -> None:
    sweep = tmp_path / "sweep"
    for words in (
        ["create_config.py", "--exp_name", sweep.name, "--out_dir", tmp_path, "--tp", 1, 2, 3, "--use_cpu"],
        ["submit_slurm_jobs.py", "--inp_dir", sweep, "--dry_run"],
        ["extract_metrics.py", "--inp_dir", sweep],
    ):
        result = run(words, closed_pipe)
        assert (result.returncode, result.stderr) == (0, "")
    assert {path.parent.name for path in sweep.glob("*/config.json")} == {"tp1", "tp2"}  # tp 3 is left out
    assert (sweep / "tp2" / "job.slurm").exists()
    assert (sweep / "metrics.csv").exists()


def test_programs_run_without_a_standard_output() -> None:
    """Closed, as by some daemons: the log is dropped, and errors are still printed."""
    program = "from workbench.run.launch import exit_on_error, logger, set_up_logging; set_up_logging()"
    program += "; logger.info('one'); exit_on_error(lambda: int('two'))"
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", program]
    result = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: invalid literal for int() with base 10: 'two'\n\n")


@pytest.mark.linux
def test_output_that_cannot_be_written_is_reported() -> None:
    with open("/dev/full", "w") as full:
        result = run(["train.py", "--config", "docs/small.json", "--explain"], full.fileno())
    assert result.returncode == 0
    assert result.stderr.startswith("the standard output cannot be written: No space left on device")
