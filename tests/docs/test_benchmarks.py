"""The benchmarks: each runs with a tiny workload, and fails if programs that it compares compute different numbers."""

from pathlib import Path
from unittest import mock

import pytest

from benchmarks import gpu
from tests.support.program import run

PROGRAMS = sorted(path.stem for path in Path("benchmarks").glob("*.py") if "__main__" in path.read_text())
ARGUMENTS = {"forecast": [], "one_gpu": ["pp2 1f1b"]}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_benchmark_prints_a_table(name: str) -> None:
    done = run("-m", f"benchmarks.{name}", *ARGUMENTS.get(name, ["--tiny"]))
    assert len(done.stdout.splitlines()) > 3


def test_the_step_whose_waits_are_counted_has_ended_before_others_are_timed() -> None:
    loss = mock.MagicMock()
    assert gpu.waits_of(lambda: loss) == []
    loss.__float__.assert_called_once()


@pytest.mark.processes
def test_a_failing_command_of_make_gpu_ends_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    commands = [
        ("fails", ["-c", "1 / 0"], 60.0),
        ("hangs", ["-c", "import time; time.sleep(60)"], 0.1),
        ("works", ["-c", ""], 60.0),
    ]
    with mock.patch.object(gpu, "commands", return_value=commands):
        assert gpu.main(["--tiny", "--only", "speed"]) == 1
    out = capfd.readouterr().out
    assert all(text in out for text in ("fails: exit status 1", "hangs: not done", "works: ok"))
    assert out.endswith("3 commands, 2 failed fails hangs\n")
