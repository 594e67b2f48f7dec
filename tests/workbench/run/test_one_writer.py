"""One run at a time writes to a folder, and a run whose torchrun was killed ends itself."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.program import TORCHRUN, arguments, metrics, run, wait_until
from workbench.run.run_folder import checkpoint_folders

pytestmark = pytest.mark.processes
MANY_STEPS = {"training.total_train_steps": 100_000, "training.eval_frequency": 0, "training.seq_length": 32}


@pytest.fixture(autouse=True)
def _signals_act() -> Iterator[None]:
    """Let signals act in the processes of a test: those of a shell's background job, or of nohup, ignore some."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Function that starts train.py, with the given words of Python before it, and waits for its first step."""
    started = []

    def start(*command: str, dp: int = 1) -> subprocess.Popen[str]:
        words = [sys.executable, *command, "train.py", *arguments(tmp_path / "run", dp, 1, **MANY_STEPS)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        wait_until(lambda: process.poll() is not None or (tmp_path / "run" / "metrics.jsonl").exists())
        assert process.poll() is None
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_rejected_until_the_first_one_is_dead(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start()
    words = arguments(tmp_path / "run", 1, 1, **MANY_STEPS, **{"training.max_tokens": 64})
    second = run("train.py", *words, code=1)
    assert f"is being written by another run (process {first.pid} on {platform.node()}, started at 20" in second.stderr
    assert "wait until it ends, or choose another folder" in second.stderr
    assert not list(tmp_path.glob("run/earlier.*"))
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    run("train.py", *words)
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1]


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], [*TORCHRUN, "2"]], ids=["forks", "torchrun"])
def test_ranks_end_with_a_checkpoint_when_their_launcher_is_killed(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], launcher: list[str]
) -> None:
    agent = start(*launcher, dp=2)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(agent.pid, signal.SIGKILL)
    wait_until(lambda: not any(Path("/proc", child).exists() for child in children))
    assert list(checkpoint_folders(tmp_path / "run")) == [metrics(tmp_path / "run")[-1]["step"]]


@pytest.mark.slow
def test_a_terminal_that_is_gone_does_not_end_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    """Writing to a terminal that was closed fails, before the signal that tells of it is looked at."""
    ours, theirs = os.openpty()
    words = [sys.executable, "train.py", *arguments(tmp_path / "run", 1, 1, **MANY_STEPS)]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    steps = tmp_path / "run" / "metrics.jsonl"
    while not steps.exists():
        os.read(ours, 10_000)  # the terminal shows what it gets
    os.close(ours)
    before = len(metrics(tmp_path / "run"))
    wait_until(lambda: len(metrics(tmp_path / "run")) > before + 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert list(checkpoint_folders(tmp_path / "run")) == [metrics(tmp_path / "run")[-1]["step"]]
