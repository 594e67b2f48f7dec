"""The budget of the trainer that one reads. Its numbers only fall: see CONTRIBUTING.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.traced_step import code_tokens

TOKENS = 22_782  # code tokens of picotron/: no comments, docstrings or layout, so that nobody saves by cramming
FILES = 28  # files of picotron/
STEP = {"functions": 118, "files": 20, "lines": 614}  # that a warm step of pp 2 x cp 2 x tp 2 runs, over all ranks


def test_the_trainer_stays_as_small_as_it_is() -> None:
    sources = [path.read_text() for path in Path("picotron").rglob("*.py")]
    assert len(sources) <= FILES
    assert sum(len(code_tokens(source)) for source in sources) <= TOKENS


@pytest.mark.processes
def test_a_step_runs_no_more_code_than_it_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.traced_step", str(tmp_path / "step.json")]
    result = subprocess.run(
        [*command, "--checkpoint.save_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    files = json.loads((tmp_path / "step.json").read_text())
    found = {
        "functions": sum(len(each["functions"]) for each in files.values()),
        "files": len(files),
        "lines": sum(each["lines"] for each in files.values()),
    }
    assert min(found.values()) > 0
    assert {name: number for name, number in found.items() if number > STEP[name]} == {}
