"""Run programs as a user does, and read the metrics of train.py."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.samples import read_jsonl

TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node"]  # words of a command of Python


def run(*words: object, code: int = 0, given: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Python in a session of its own, with environment variables and what its standard input gives.
    Its exit code should be `code`.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)], input=given, capture_output=True, text=True, env=os.environ | variables,
        timeout=240, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true, for at most 200 seconds."""
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def arguments(save_dir: Path, dp: int, batch: int, **more: Any) -> list[str]:
    """Return the words of train.py for four steps of the quickstart's model."""
    keys = {
        "distributed.dp_size": dp, "distributed.tp_size": 1, "distributed.pp_size": 1, "model.dtype": "float64", "model.num_hidden_layers": 2, "training.total_train_steps": 4,
        "training.num_samples": 100,
        "training.seq_length": 64, "training.micro_batch_size": batch, "training.gradient_accumulation_steps": 2,
        "training.warmup_steps": 2, "training.eval_frequency": 2, "training.eval_steps": 1, "checkpoint.save_dir": save_dir, **more,
    }  # fmt: skip
    return ["--config", "template/base_config.json", *options(keys)]


def options(keys: dict[str, Any]) -> list[str]:
    """Return the words of a command line that set keys; `training__seed` stands for training.seed."""
    return [str(word) for key, value in keys.items() for word in (f"--{key.replace('__', '.')}", value)]


def metrics(save_dir: Path) -> list[dict[str, Any]]:
    """Return the records of the steps, without the evaluation before the first one."""
    return [record for record in read_jsonl(save_dir / "metrics.jsonl") if record["step"] > 0]


def changed_program(folder: Path, in_step: str, call: int = 10) -> str:
    """Write a train.py that runs `in_step` once, when the last rank loads a micro-batch, after making a file `marker`.
    With the usual `arguments`, the tenth is the second one of the third step.
    """
    path = folder / "program.py"
    path.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import os, pathlib, signal, train, torch\n"
        "from picotron.console import UserError\n"
        "from picotron.data.loader import MicroBatchDataLoader\n"
        "load, calls = MicroBatchDataLoader.__next__, []\n"
        f"marker = pathlib.Path({str(folder / 'marker')!r})\n"
        "def changed(self):\n"
        "    calls.append(1)\n"
        f"    if len(calls) == {call} and not marker.exists() and int(os.environ.get('RANK', 0)) == int(os.environ.get('WORLD_SIZE', 1)) - 1:\n"
        "        marker.touch()\n"
        f"        {in_step}\n"
        "    return load(self)\n"
        "MicroBatchDataLoader.__next__ = changed\n"
        "if __name__ == '__main__': train.exit_on_error(train.main)\n"
    )
    return str(path)
