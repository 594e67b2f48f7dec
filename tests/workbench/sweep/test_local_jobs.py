"""Sweeps on this machine, without Slurm, with a model that trains within seconds."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from picotron.run.run_folder import checkpoint_folders
from submit_slurm_jobs import read_config
from tests.support.jobs import RESUMED, log_of, processes_of, run_program, wait_for
from tests.support.program import metrics
from workbench.sweep import local_jobs
from workbench.sweep.jobs import Job
from workbench.sweep.local_jobs import run_local_jobs
from workbench.sweep.slurm import update_statuses


@pytest.mark.slow
def test_jobs_start_from_the_load_path_of_their_config_and_continue_from_their_own_checkpoint(
    make_job: Callable[..., Job], home: Path
) -> None:
    environment, frequent = {**os.environ, "HOME": str(home)}, {"checkpoint__save_frequency": 3}
    base = make_job("base", training__total_train_steps=3, **frequent)
    run_program(base.folder, "--local", environment=environment)
    start = base.run_folder / "step_00000003"
    tuned = make_job("tuned", training__total_train_steps=6, checkpoint__load_path=str(start), **frequent)
    run_program(tuned.folder, "--local", environment=environment)
    assert f"{RESUMED} {start}\n" in log_of(tuned)
    assert [record["step"] for record in metrics(tuned.run_folder)] == [4, 5, 6]

    make_job("tuned", training__total_train_steps=9, checkpoint__load_path=str(start), **frequent)
    run_program(tuned.folder, "--local", "--only", "completed", environment=environment)
    assert f"{RESUMED} {tuned.run_folder}/step_00000006\n" in log_of(tuned)
    assert [record["step"] for record in metrics(tuned.run_folder)] == [4, 5, 6, 7, 8, 9]


@pytest.mark.processes
def test_ctrl_c_after_a_job_has_ended_is_not_lost(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, set_status = [make_job("1"), make_job("2")], Job.set_status

    def interrupt_at_the_end(job: Job, status: Any) -> None:
        if status == "completed":
            signal.raise_signal(signal.SIGINT)
        set_status(job, status)

    monkeypatch.setattr(Job, "set_status", interrupt_at_the_end)
    monkeypatch.setattr(local_jobs, "torchrun_command", lambda *_: ["true"])
    before = signal.getsignal(signal.SIGINT)
    assert run_local_jobs({job: read_config(job) for job in jobs}, None, 5, dry_run=False) == 130
    assert [job.status for job in jobs] == ["completed", "init"]
    assert capsys.readouterr().out == "1: completed, 0 s\n"
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_local_jobs_resume_after_a_timeout_and_after_ctrl_c(make_job: Callable[..., Job], home: Path) -> None:
    """Both end with a checkpoint."""
    environment = {**os.environ, "HOME": str(home)}
    slow = {"training__total_train_steps": 1_000_000}
    over_time, interrupted = make_job("1_over_time", **slow), make_job("2_interrupted", **slow)
    later, sweep = make_job("3_later"), over_time.folder.parent

    command = [sys.executable, "submit_slurm_jobs.py", "--inp_dir", str(sweep), "--local", "--timeout", "60"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (interrupted.run_folder / "metrics.jsonl").exists(), interrupted)
        # Neither of these commands stops the running job.
        run_program(sweep, "--local", "--only", "running", environment=environment)
        assert re.search("running +1\n", run_program(sweep, "--check_status", environment=environment))
        process.send_signal(signal.SIGINT)
        output = process.communicate()[0]
    assert process.returncode == 130
    assert re.search(r"^1_over_time: timeout, \d+ s\n2_interrupted: cancelled, \d+ s$", output, re.MULTILINE)
    assert [job.status for job in (over_time, interrupted, later)] == ["timeout", "cancelled", "init"]
    assert not processes_of(interrupted)
    for job in (over_time, interrupted):
        reached = max(checkpoint_folders(job.run_folder))
        make_job(job.name, **slow, training__max_tokens=(reached + 3) * 64)
    run_program(sweep, "--local", "--only", "timeout", "cancelled", environment=environment)
    for job in (over_time, interrupted):
        assert job.status == "completed"
        assert RESUMED in log_of(job)


@pytest.mark.slow
def test_job_fails_when_its_runner_and_then_its_processes_are_killed(make_job: Callable[..., Job], home: Path) -> None:
    """After its runner was killed, a job is still running as long as its torchrun runs. --check_status sees both."""
    job, environment = make_job("job", training__total_train_steps=1_000_000), {**os.environ, "HOME": str(home)}
    command = [sys.executable, "submit_slurm_jobs.py", "--inp_dir", str(job.folder), "--local"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: processes_of(job), job)
        process.kill()
    run_program(job.folder, "--check_status", environment=environment)
    assert job.status == "running"
    for process_id in processes_of(job):
        os.kill(process_id, signal.SIGKILL)
    wait_for(lambda: "fail           1" in run_program(job.folder, "--check_status", environment=environment), job)


@pytest.mark.slow
def test_local_job_without_memory_has_status_oom(
    make_job: Callable[..., Job], model_folder: Path, home: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_folder, tmp_path / "large")
    sizes = json.loads((model_folder / "config.json").read_text()) | {"intermediate_size": 2**24, "hidden_size": 2**16}
    (tmp_path / "large" / "config.json").write_text(json.dumps(sizes))
    job = make_job("job", model__name=str(tmp_path / "large"))
    run_program(job.folder, "--local", environment={**os.environ, "HOME": str(home)}, code=1)
    assert job.status == "oom", log_of(job)


def test_a_check_of_the_statuses_claims_no_job_that_can_start(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that starts jobs leaves out those that another process has claimed."""
    job = make_job("one")
    monkeypatch.setattr(Job, "claim", lambda self: pytest.fail("the job is claimed"))
    update_statuses([job])
    assert job.status == "init"


def test_a_sweep_whose_jobs_on_slurm_are_completed_needs_no_slurm(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("one")
    (job.folder / "slurm_job_id.txt").write_text("7\n")
    job.set_status("completed")
    monkeypatch.setenv("PATH", "/nowhere")
    update_statuses([job])
