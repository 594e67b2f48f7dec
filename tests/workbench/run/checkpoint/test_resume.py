"""Runs that were killed, stopped or out of disk space resume exactly, in worker processes and as programs."""

import os
import random
import signal
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.worker_pool import WorkerError, WorkerPool
from picotron.config import Training
from tests.support.checkpoints import run_config, tensors_of, train
from tests.support.oracle import tiny_llama
from tests.support.program import TORCHRUN, arguments, changed_program, metrics, run
from workbench.files import UNFINISHED
from workbench.run.checkpoint.checkpoint import Checkpoint
from workbench.run.run_folder import checkpoint_folder, checkpoint_folders

KILLS = 2


def kill_in_a_while(pool: WorkerPool, save_dir: Path, steps: int, delay: float, writing: bool) -> None:
    """Send SIGKILL to all processes of the pool `delay` seconds after `steps` more checkpoints exist than now.

    Args:
        writing: whether to wait until a checkpoint is being written.
    """
    goal = max(checkpoint_folders(save_dir), default=0) + steps
    while max(checkpoint_folders(save_dir), default=0) < goal:
        time.sleep(0.0005)
    time.sleep(delay)
    while True:
        send(pool, signal.SIGSTOP)
        coming = checkpoint_folder(save_dir, max(checkpoint_folders(save_dir)) + 1)
        if not writing or coming.with_name(coming.name + UNFINISHED).exists():
            break
        send(pool, signal.SIGCONT)
        time.sleep(0.0005)
    send(pool, signal.SIGKILL)


def send(pool: WorkerPool, number: int) -> None:
    for process in pool.processes:
        os.kill(process.pid, number)


@pytest.mark.processes
def test_killed_and_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """Kill two ranks that save every step at random moments, also while they write; restart the run each time."""
    pool, generator, unfinished = WorkerPool(), random.Random(0), 0
    model, layout = tiny_llama(), "pp2"
    steps = 10 + 4 * KILLS
    keys = {"training__total_train_steps": steps, "checkpoint__save_frequency": 1, "checkpoint__load_path": "latest"}
    config = run_config(tmp_path / "killed", layout, checkpoint__keep_last=3, **keys)
    try:
        for kill in range(KILLS):
            moment = generator.randrange(1, 4), generator.random() * 0.04, kill % 2 == 0
            killer = threading.Thread(target=kill_in_a_while, args=(pool, tmp_path / "killed", *moment), daemon=True)
            killer.start()
            with pytest.raises(WorkerError, match="the worker died"):
                pool.run(train, 2, config, model)
            killer.join()
            unfinished += len(list((tmp_path / "killed").glob("*.unfinished")))
        went_on_from = max(checkpoint_folders(tmp_path / "killed"))
        (result, _) = pool.run(train, 2, config, model)
        (whole, _) = pool.run(train, 2, run_config(tmp_path / "whole", layout, **keys), model)
    finally:
        pool.close()
    assert KILLS <= went_on_from < steps
    assert unfinished >= KILLS / 2  # these runs were killed while they wrote
    assert result["losses"] == whole["losses"][went_on_from:]
    assert list(checkpoint_folders(tmp_path / "killed")) == [steps - 2, steps - 1, steps]
    assert len(list((tmp_path / "killed").iterdir())) == 3
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        ours, theirs = (tensors_of(checkpoint_folder(tmp_path / name, steps), kind) for name in ("killed", "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_learning_rate_that_jumps_or_is_high_for_trained_weights_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A finished cosine is prolonged from 10 to 20 steps, which makes its middle of its end; wsd has no jump."""

    def warning(state: Any, **training: Any) -> str:
        checkpoint = object.__new__(Checkpoint)
        checkpoint.state = state
        caplog.clear()
        checkpoint.progress("", Training.model_validate(training))
        return caplog.text

    assert "is high for weights that are trained already" in warning(None, learning_rate=5e-3)
    assert not warning(None, learning_rate=2e-5)
    for scheduler, step, expected in (("cosine", 10, "step 11 is 0.0055, but 0.001 in"), ("wsd", 5, "")):
        keys = {"learning_rate": 1e-2, "lr_scheduler": scheduler, "warmup_steps": 0}
        config = {"training": keys | {"total_train_steps": 10}}
        state = types.SimpleNamespace(step=step, tokens=0, samples=0, data_fingerprint="", config=config)
        found = warning(state, **keys, total_train_steps=20)
        assert expected in found
        assert bool(expected) == bool(found)


# ------------------------------------------------------------------------------------------------------ whole programs


@pytest.mark.processes
def test_a_signal_ends_a_run_after_its_step(tmp_path: Path) -> None:
    """All ranks save a checkpoint, although none is due and only one gets the signal. The exit code is 128 + SIGINT."""
    stopped = changed_program(tmp_path, "os.kill(os.getpid(), signal.SIGINT)")
    words = arguments(tmp_path / "run", 2, 2, **{"checkpoint.save_frequency": "null"})
    result = run(stopped, *words, code=128 + signal.SIGINT)
    assert "Traceback" not in result.stderr
    assert "error" not in result.stderr
    assert f"checkpoint {tmp_path}/run/step_00000003: " in result.stdout
    assert result.stdout.endswith("stopped by SIGINT, without an error\n")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    files = [".run_lock", "config.json", "metrics.jsonl", "step_00000003"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == files


@pytest.mark.slow
@pytest.mark.processes
def test_sigterm_to_torchrun_saves_a_checkpoint_and_ends_the_run(tmp_path: Path) -> None:
    stopped = changed_program(tmp_path, "os.kill(os.getppid(), signal.SIGTERM)")
    keys = {"distributed.pp_size": 2, "training.total_train_steps": 1000}
    words = [*TORCHRUN, "2", stopped, *arguments(tmp_path / "run", 1, 4, **keys)]
    result = run(*words, code=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "stopped by SIGTERM, without an error" in result.stdout
    assert list(checkpoint_folders(tmp_path / "run")) == [len(metrics(tmp_path / "run"))]
