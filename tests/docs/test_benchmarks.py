"""The benchmarks: each runs with a tiny workload, and fails if programs that it compares compute different numbers."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.fake_cuda import obstacle

PROGRAMS = sorted(path.stem for path in Path("benchmarks").glob("*.py") if "__main__" in path.read_text())
ARGUMENTS = {"forecast": [], "roofline": ["--model", "smollm-1.7b", "--model.num_hidden_layers", "2"]}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_benchmark_prints_a_table(name: str) -> None:
    if name == "roofline" and obstacle() is not None:
        pytest.skip(str(obstacle()))
    command = [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS.get(name, ["--tiny"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 3
