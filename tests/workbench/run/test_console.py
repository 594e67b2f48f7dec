"""Programs whose output nobody reads any more finish their work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import create_config
import submit_slurm_jobs
from workbench.sweep import table

pytestmark = pytest.mark.processes


def test_programs_finish_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    sweep = str(tmp_path / "sweep")
    create_config.main(["--exp_name", "sweep", "--out_dir", str(tmp_path), "--tp", "1", "2", "3", "--use_cpu"])
    submit_slurm_jobs.main(["--inp_dir", sweep, "--dry_run"])
    table.main(["--inp_dir", sweep])
    assert {path.name for path in tmp_path.glob("sweep/*/*")} >= {"config.json", "job.slurm"}
    assert (tmp_path / "sweep" / "metrics.csv").exists()


def test_programs_run_without_a_standard_output() -> None:
    """Closed, as by some daemons: the log is dropped, and errors are still printed."""
    program = "from workbench.run.launch import exit_on_error, logger, set_up_logging; set_up_logging()"
    program += "; logger.info('one'); exit_on_error(lambda: int('two'))"
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", program]
    result = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=240)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: invalid literal for int() with base 10: 'two'\n\n")


@pytest.mark.linux
def test_output_that_cannot_be_written_is_reported() -> None:
    program = "from workbench.console import print_line; print_line('one'); print_line('two')"
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", program]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=True)
    text = "the standard output cannot be written: No space left on device; the rest of it is dropped\n"
    assert result.stderr == text
