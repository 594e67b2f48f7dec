"""The benchmarks: each runs with a tiny workload, and fails if programs that it compares compute different numbers."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.fake_cuda import obstacle
from benchmarks.side_by_side import DifferentResults, Measurement, check_same_losses

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


def test_different_losses_of_either_of_the_first_two_steps_are_an_error() -> None:
    theirs = Measurement([1.0], 1.0, [5.0, 4.0, 3.0])
    check_same_losses({"theirs": theirs, "ours": theirs._replace(losses=[5.00002, 4.0, 2.0])})
    for losses, step in (([5.01, 4.0], 1), ([5.0, 4.01], 2)):
        with pytest.raises(DifferentResults, match=f"step {step}: "):
            check_same_losses({"theirs": theirs, "ours": theirs._replace(losses=losses)})
