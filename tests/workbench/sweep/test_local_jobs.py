"""Sweeps on this machine, without Slurm, with a model that trains within seconds."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from submit_slurm_jobs import read_config
from tests.support.jobs import submit
from tests.support.program import metrics, wait_until
from workbench.run.run_folder import checkpoint_folders
from workbench.sweep import local_jobs, slurm
from workbench.sweep.jobs import Job
from workbench.sweep.local_jobs import run_local_jobs

pytestmark = pytest.mark.processes
RESUMED = "training resumes from"  # start of the line that a resumed run logs, before the checkpoint's folder


@pytest.mark.parametrize(
    ("said", "status"), [("stopped by SIGTERM, without an error", "cancelled"), ("out of memory", "oom"), ("", "fail")]
)
def test_the_log_of_a_job_says_how_it_ended(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, said: str, status: str
) -> None:
    job = make_job("job")
    monkeypatch.setattr(local_jobs, "command", lambda *_: ["bash", "-c", f"echo {said}; exit 1"])
    assert run_local_jobs({job: read_config(job)}, None, 1, dry_run=False) == 1
    assert job.status == status


def test_a_closed_terminal_stops_a_job(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("job")
    monkeypatch.setattr(local_jobs, "command", lambda *_: ["bash", "-c", "kill -HUP $PPID; sleep 2"])
    handler = signal.signal(signal.SIGHUP, lambda *_: None)  # as if no nohup had started the tests
    run_local_jobs({job: read_config(job)}, None, 1, dry_run=False)
    signal.signal(signal.SIGHUP, handler)
    assert job.status == "cancelled"


@pytest.mark.slow
def test_jobs_start_from_the_load_path_of_their_config_and_continue_from_their_own_checkpoint(
    make_job: Callable[..., Job],
) -> None:
    frequent = {"checkpoint__save_frequency": 3}
    base = make_job("base", training__total_train_steps=3, **frequent)
    submit(base.folder, "--local")
    start = base.run_folder / "step_00000003"
    tuned = make_job("tuned", training__total_train_steps=6, checkpoint__load_path=str(start), **frequent)
    submit(tuned.folder, "--local")
    assert f"{RESUMED} {start}\n" in slurm.log_file(tuned).read_text()
    assert [record["step"] for record in metrics(tuned.run_folder)] == [4, 5, 6]

    make_job("tuned", training__total_train_steps=9, checkpoint__load_path=str(start), **frequent)
    submit(tuned.folder, "--local", "--only", "completed")
    assert f"{RESUMED} {tuned.run_folder}/step_00000006\n" in slurm.log_file(tuned).read_text()
    assert [record["step"] for record in metrics(tuned.run_folder)] == [4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_local_jobs_resume_after_a_timeout_and_after_ctrl_c(make_job: Callable[..., Job]) -> None:
    """Both end with a checkpoint."""
    slow = {"training__total_train_steps": 1_000_000}
    over_time, interrupted = make_job("1_over_time", **slow), make_job("2_interrupted", **slow)
    later, sweep = make_job("3_later"), over_time.folder.parent

    command = [sys.executable, "submit_slurm_jobs.py", "--inp_dir", str(sweep), "--local", "--timeout", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (interrupted.run_folder / "metrics.jsonl").exists())
        # Neither of these commands stops the running job.
        submit(sweep, "--local", "--only", "running")
        assert re.search("running +1\n", submit(sweep, "--check_status"))
        process.send_signal(signal.SIGINT)
        output = process.communicate()[0]
    assert process.returncode == 130
    assert re.search(r"^1_over_time: timeout, \d+ s\n2_interrupted: cancelled, \d+ s$", output, re.MULTILINE)
    assert [job.status for job in (over_time, interrupted, later)] == ["timeout", "cancelled", "init"]
    assert str(interrupted.config_file) not in subprocess.check_output(["ps", "-ewwo", "args"], text=True)
    for job in (over_time, interrupted):
        reached = max(checkpoint_folders(job.run_folder))
        make_job(job.name, **slow, training__max_tokens=(reached + 3) * 64)
    submit(sweep, "--local", "--only", "timeout", "cancelled")
    for job in (over_time, interrupted):
        assert job.status == "completed"
        assert RESUMED in slurm.log_file(job).read_text()
