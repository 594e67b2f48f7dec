"""The whole program, started as a user does."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conformance.oracle import assert_close
from tests.support.program import TORCHRUN, arguments, metrics, run


@pytest.fixture(scope="module")
def one_process(home: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of a run on one process, whose output is checked here."""
    save_dir = tmp_path_factory.mktemp("one")
    one = run(home, 0, *arguments(save_dir, 1, 4))
    assert one.returncode == 0, one.stderr
    output = one.stdout + one.stderr
    assert re.search(r"loss 7\.\d+ -> \d\.\d+ \(a uniform guess has 6\.9315\)", output)
    assert f"config.json and metrics.jsonl are in {save_dir}" in output
    assert len(re.findall(r"^step +\d+ \| loss ", output, re.MULTILINE)) == 4
    assert "Warning" not in output
    lines = metrics(save_dir)
    assert len(lines) == 4
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    assert ["eval_loss" in line for line in lines] == [False, True, False, True]
    assert lines[3]["eval_loss"] < lines[1]["eval_loss"]
    assert len(re.findall(r" \| eval loss \d\.\d{4} \| \d\.\d{4} bits per byte$", output, re.MULTILINE)) == 2
    return lines


@pytest.mark.slow
def test_two_stages_write_the_metrics_of_one_process(
    one_process: list[dict[str, Any]], home: Path, tmp_path: Path
) -> None:
    result = run(home, 2, *arguments(tmp_path, 1, 4, **{"distributed.pp_size": 2, "logging.level": "debug"}))
    assert result.returncode == 0, result.stderr
    lines = metrics(tmp_path)
    for field in ("step", "loss", "grad_norm", "learning_rate", "tokens"):
        assert_close([line[field] for line in lines], [line[field] for line in one_process], what=field)
    assert_close([line["eval_loss"] for line in lines[1::2]], [line["eval_loss"] for line in one_process[1::2]])
    output = result.stdout + result.stderr
    assert "dp 1 x pp 2 x cp 1 x tp 1 | 500,352 parameters" in output
    assert "Warning" not in output
    assert json.loads((tmp_path / "config.json").read_text())["distributed"]["pp_size"] == 2
    assert output.count("[rank 1, stage 1] B1\n") == 4


@pytest.mark.slow
def test_a_run_that_resumes_on_more_data_keeps_its_bpe(home: Path, tmp_path: Path) -> None:
    """Another BPE would give the token ids other meanings than those that the weights have learned."""
    folder, save_dir = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    (folder / "a.txt").write_text("She sells sea shells by the sea shore.\n" * 400)
    keys = {"dataset.name": folder, "training.eval_frequency": 0, "training.warmup_steps": 1}
    keys |= {"checkpoint.save_frequency": 2, "checkpoint.load_path": "latest"}
    for steps in (2, 4):
        result = run(home, 0, *arguments(save_dir, 1, 2, **keys | {"training.total_train_steps": steps}))
        assert result.returncode == 0, result.stderr
        (folder / "b.txt").write_text("Peter Piper picked a peck of pickled peppers.\n" * 400)
    assert "was trained on different data" in result.stdout + result.stderr
    assert [line["step"] for line in metrics(save_dir)] == [1, 2, 3, 4]
    first, second = (save_dir / f"step_{step:08}" / "tokenizer.json" for step in (2, 4))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("processes", "words", "message"),
    [
        (0, ["--training.lr", "1"], "unknown key training.lr"),
        pytest.param(2, ["--distributed.dp_size", "3"], "needs 3 processes, but 2 started; use torchrun --nproc_per_node 3", marks=pytest.mark.slow),
        pytest.param(0, ["--training.learning_rate", "1e30", "--training.warmup_steps", "0", "--training.gradient_accumulation_steps", "1"], "step 2: grad_norm is nan; try a lower", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_user_error_ends_the_program_with_one_line(
    home: Path, tmp_path: Path, processes: int, words: list[str], message: str
) -> None:
    one = [f"--distributed.{axis}_size=1" for axis in ("dp", "tp", "pp")]
    result = run(home, processes, "--checkpoint.save_dir", str(tmp_path), *one, *words)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if "error: " in line and line.startswith("[rank")]
    assert len(errors) == 1, result.stderr
    assert message in errors[0]
    assert "in train_step" not in result.stderr  # no traceback of train.py (torchrun adds its own below)
    assert "in main" not in result.stderr.split("torch/distributed/run.py")[0]


def run_broken(
    home: Path, tmp_path: Path, in_step: str, **layout: Any
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run two processes, of which rank 1 executes `in_step` in its second step. Returns the result and the end time."""
    program = tmp_path / "broken.py"
    program.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import os, signal, train, torch\n"
        "from picotron.data.loader import MicroBatchDataLoader\n"
        "load, calls = MicroBatchDataLoader.__next__, []\n"
        "def broken(self):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == 4 and torch.distributed.get_rank() == 1: {in_step}\n"
        "    return load(self)\n"
        "MicroBatchDataLoader.__next__ = broken\n"
        "train.exit_on_error(train.main)\n"
    )
    config = ["--config", "template/base_config.json", *arguments(tmp_path / "run", 1, 2, **layout)]
    environment = {**os.environ, "HOME": str(home)}
    result = subprocess.run(
        [*TORCHRUN, "2", str(program), *config],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    return result, time.time()


def test_killed_stage_ends_the_run_within_30_seconds(home: Path, tmp_path: Path) -> None:
    """The stage is killed in the middle of a step, while the other stage waits for a message from it."""
    killed = tmp_path / "killed"
    result, end = run_broken(
        home,
        tmp_path,
        f"open({str(killed)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)",
        **{"distributed.pp_size": 2},
    )
    assert result.returncode != 0
    assert end - killed.stat().st_mtime < 30
    assert "Signal 9 (SIGKILL)" in result.stderr
    assert len(metrics(tmp_path / "run")) == 1


@pytest.mark.slow
def test_gloo_listens_on_the_loopback_interface(home: Path, tmp_path: Path) -> None:
    """The addresses of the listening sockets of two ranks, as the first rank sees them after the first step."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import os, train\n"
        "from picotron.run.metrics import Metrics\n"
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
    result = subprocess.run(
        [*TORCHRUN, "2", str(program), "--config", "template/base_config.json", *words],
        env={**os.environ, "HOME": str(home)}, capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    assert set(re.findall("listening on ([0-9A-F]{8})", result.stdout)) == {"0100007F"}  # 127.0.0.1
