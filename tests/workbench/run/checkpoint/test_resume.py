"""Runs that were killed, stopped or out of disk space resume exactly, in worker processes and as programs."""

import os
import signal
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import LlamaConfig

from conformance.worker_pool import WorkerError, WorkerPool
from picotron.config import Config, Training
from tests.support.checkpoints import assert_same_tensors, run_config, train
from tests.support.oracle import tiny_llama
from tests.support.program import TORCHRUN, arguments, changed_program, metrics, run
from workbench.run.checkpoint.checkpoint import Checkpoint
from workbench.run.run_folder import checkpoint_folder, checkpoint_folders


def train_until_killed(config: Config, model_config: LlamaConfig, name: str, calls: int) -> None:
    """Train until this rank would call a function of `os` more than so many times."""
    function, remaining = getattr(os, name), iter(range(calls))

    def call_or_die(*arguments: Any, **options: Any) -> Any:
        if next(remaining, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    with mock.patch.object(os, name, call_or_die):
        train(config, model_config)


def test_killed_and_resumed_run_equals_an_uninterrupted_run(pool: WorkerPool, tmp_path: Path) -> None:
    """A run of two ranks that save every step is killed while it deletes a checkpoint, and while it writes one."""
    model, steps = tiny_llama(), 8
    keys = {"training__total_train_steps": steps, "checkpoint__save_frequency": 1, "checkpoint__load_path": "latest"}
    config = run_config(tmp_path / "killed", "pp2", checkpoint__keep_last=3, **keys)
    for name, calls in (("unlink", 3), ("fsync", 17)):  # 13 calls for each checkpoint
        with pytest.raises(WorkerError, match="the worker died"):
            pool.run(train_until_killed, 2, config, model, name, calls)
        assert list((tmp_path / "killed").glob("*.unfinished"))
    went_on_from = max(checkpoint_folders(tmp_path / "killed"))
    (result, _) = pool.run(train, 2, config, model)
    (whole, _) = pool.run(train, 2, run_config(tmp_path / "whole", "pp2", **keys), model)
    assert result["losses"] == whole["losses"][went_on_from:]
    assert list(checkpoint_folders(tmp_path / "killed")) == [steps - 2, steps - 1, steps]
    assert len(list((tmp_path / "killed").iterdir())) == 3
    assert_same_tensors(*(checkpoint_folder(tmp_path / name, steps) for name in ("killed", "whole")))


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
