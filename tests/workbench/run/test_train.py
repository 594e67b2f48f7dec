"""The whole program, started as a user does."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.program import TORCHRUN, arguments, changed_program, metrics, run

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_run_that_resumes_on_more_data_keeps_its_bpe(tmp_path: Path) -> None:
    """Another BPE would give the token ids other meanings than those that the weights have learned."""
    folder, save_dir = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    (folder / "a.txt").write_text("She sells sea shells by the sea shore.\n" * 400)
    keys = {"dataset.name": folder, "training.eval_frequency": 0, "training.warmup_steps": 1}
    keys |= {"checkpoint.save_frequency": 2, "checkpoint.load_path": "latest"}
    for steps in (2, 4):
        result = run("train.py", *arguments(save_dir, 1, 2, **keys | {"training.total_train_steps": steps}))
        (folder / "b.txt").write_text("Peter Piper picked a peck of pickled peppers.\n" * 400)
    assert "was trained on different data" in result.stdout + result.stderr
    assert [line["step"] for line in metrics(save_dir)] == [1, 2, 3, 4]
    first, second = (save_dir / f"step_{step:08}" / "tokenizer.json" for step in (2, 4))
    assert first.read_bytes() == second.read_bytes()


def test_the_sentence_of_the_rank_that_fails_is_the_last_line(tmp_path: Path) -> None:
    """The others wait for it in a collective."""
    failing = changed_program(tmp_path, "raise UserError('rank 1 does not like batch 4')", 4)
    result = run(failing, *arguments(tmp_path / "run", 2, 1), code=1)
    assert result.stderr.endswith("\n[rank 1] error: rank 1 does not like batch 4\n\n")


@pytest.mark.parametrize(("name", "hint"), [("SIGKILL", "if memory runs out"), ("SIGABRT", "which NCCL does if")])
def test_killed_stage_ends_the_run_within_30_seconds(tmp_path: Path, name: str, hint: str) -> None:
    """The stage is killed in the middle of a step, while the other stage waits for a message from it."""
    broken = changed_program(tmp_path, f"os.kill(os.getpid(), signal.{name})", 4)
    words = arguments(tmp_path / "run", 1, 2, **{"distributed.pp_size": 2, "training.eval_frequency": 0})
    result = run(broken, *words, code=128 + signal.Signals[name])
    assert time.time() - (tmp_path / "marker").stat().st_mtime < 30
    assert re.search(rf"\[rank 1\] error: the process was ended by {name}, .*{hint}", result.stderr)
    assert len(metrics(tmp_path / "run")) == 1


@pytest.mark.linux
@pytest.mark.slow
def test_gloo_listens_on_the_loopback_interface(tmp_path: Path) -> None:
    """The addresses of the listening sockets of two ranks, as the first rank sees them after the first step."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import os, train\n"
        "from workbench.run.metrics import Metrics\n"
        "def log(self, record):\n"
        "    for line in open('/proc/net/tcp').read().splitlines()[1:]:\n"
        "        fields = line.split()\n"
        "        links = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if fd.isdigit() and os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "        if fields[3] == '0A' and f'socket:[{fields[9]}]' in links:\n"
        "            print('listening on', fields[1].split(':')[0], flush=True)\n"
        "Metrics.log = log\n"
        "train.exit_on_error(train.main)\n"
    )
    words = arguments(tmp_path / "run", 2, 1, **{"training.max_tokens": 64})
    result = run(*TORCHRUN, "2", program, *words)
    assert set(re.findall("listening on ([0-9A-F]{8})", result.stdout)) == {"0100007F"}  # 127.0.0.1


@pytest.mark.linux
@pytest.mark.parametrize(
    "command",
    [
        # a warm process has imported what a program imports too late
        pytest.param(["-m", "steps.only_dp"], id="steps", marks=pytest.mark.cold),
        pytest.param(["train.py"], id="train"),
    ],
)
def test_gloo_has_no_thread_when_python_ends(tmp_path: Path, command: list[str]) -> None:
    """A thread that still frees a tensor then would abort the process, which happens on a busy machine."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, os, runpy, sys; sys.path.insert(0, '.')\n"
        "names = lambda: [open(f'/proc/self/task/{each}/comm').read() for each in os.listdir('/proc/self/task')]\n"
        "atexit.register(lambda: print('threads:', *(name for name in names() if 'gloo' in name)))\n"
        f"sys.argv[0:1] = {command[-1:]}\n"
        f"runpy.run_{'module' if command[0] == '-m' else 'path'}({command[-1]!r}, run_name='__main__')\n"
    )
    words = [] if command[0] == "-m" else arguments(tmp_path / "run", 1, 1, **{"training.max_tokens": 64})
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = run(program, *words, **rank)
    assert result.stdout.endswith("threads:\n"), result.stdout + result.stderr


@pytest.mark.slow
def test_wandb_has_the_steps_before_an_error(tmp_path: Path) -> None:
    failing = changed_program(tmp_path, "raise UserError('no')")
    words = arguments(tmp_path / "run", 1, 1, **{"logging.use_wandb": "true"})
    result = run(failing, *words, code=1, WANDB_MODE="offline")
    assert result.stderr.endswith("error: no\n\n"), result.stderr
    (log,) = (tmp_path / "run").rglob("*.wandb")
    assert b"grad_norm" in log.read_bytes()
