"""Sweeps on Slurm: batch scripts, sbatch commands, and statuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron.console import UserError
from submit_slurm_jobs import main, read_config
from tests.support.jobs import SHELL_SYNTAX, submit
from workbench.run.config_reader import parse_config
from workbench.run.with_keys import with_keys
from workbench.sweep import slurm
from workbench.sweep.jobs import Job
from workbench.sweep.slurm import SlurmResources, reconcile_status, render, sbatch_command


def run_script(job: Job, folder: Path, srun: str, resources: SlurmResources, setup: str = "setup.sh") -> int:
    """Run the batch script of a job with a program for srun. Returns its exit code."""
    (folder / setup).write_text(f"srun() {{ {srun}; }}\n")
    (folder / "job.slurm").write_text(render(job, read_config(job), resources, folder / setup, 77))
    return subprocess.run(["bash", "job.slurm"], cwd=folder, env={**os.environ, "SLURM_JOB_ID": "15003"}).returncode


@pytest.mark.processes
def test_batch_script_quotes_names_with_shell_syntax(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """srun gets every word unchanged, and no part of a name is executed."""
    job = make_job(SHELL_SYNTAX + "\nnext line")
    srun, setup = "printf '%s\\0' \"$@\" > words", f"{SHELL_SYNTAX}.sh"
    assert run_script(job, tmp_path, srun, SlurmResources(2, 4, 8, 0), setup) == 0
    assert slurm.log_file(job).parent.joinpath("log_15003.out").read_text() == ""
    assert job.status == "completed"
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    options, torchrun, arguments = words[:4], words[4:-7], words[-7:]
    assert options == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"]
    assert torchrun[:7] == [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "4"]
    assert torchrun[torchrun.index("--rdzv_endpoint") + 1].endswith(":15003")
    assert re.fullmatch("15003-[0-9a-f]{32}", torchrun[torchrun.index("--rdzv_id") + 1])
    assert torchrun[-1] == "77" or torch.__version__ < "2.12"
    assert [Path(arguments[0]).name, *arguments[1:]] == ["train.py", *job.arguments(read_config(job))]
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("srun", "code", "status"),
    [
        ("return 3", 3, "fail"),
        ("echo torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; return 1", 1, "oom"),
        ("kill -USR1 $$; sleep 0.2; return 1", 1, "timeout"),
        ("kill -USR1 $$; sleep 0.2", 0, "completed"),  # the run has ended in time
        ("kill -TERM $$; sleep 0.2; return 1", 1, "cancelled"),
        ("echo srun: error: Node failure on n0", 1, "fail"),  # and succeeds
        ("echo stopped by SIGTERM, without an error; return 1", 1, "cancelled"),  # before a preemption
    ],
)
def test_batch_script_records_how_the_run_ended(
    make_job: Callable[..., Job], tmp_path: Path, srun: str, code: int, status: str
) -> None:
    job = make_job("job")
    slurm.log_file(job).with_name("log_15003.out").write_text("CUDA out of memory, in an earlier attempt\n")
    found = run_script(job, tmp_path, f"trap '' USR1; {srun}", SlurmResources(1, 1, 1, 0))
    assert (found, job.status) == (code, status)


def test_sbatch_command_requests_nodes_cores_and_gpus(make_job: Callable[..., Job]) -> None:
    job = make_job("job", distributed__dp_size=4, distributed__tp_size=4, environment__OMP_NUM_THREADS=3)
    cpus = parse_config(json.loads(job.config_file.read_text()))
    gpus = with_keys(cpus, distributed={"use_cpu": False})
    assert SlurmResources.of(job, gpus, 8) == SlurmResources(2, 8, 24, 8)
    assert SlurmResources.of(job, gpus, 64) == SlurmResources(1, 16, 48, 16)
    command = sbatch_command(job, SlurmResources.of(job, gpus, 8), {"qos": "a b", "time": "2:00:00"}, 60, after="7")
    options = {"--gres=gpu:8", "--qos=a b", "--time=2:00:00", "--signal=B:USR1@60", "--dependency=afterany:7"}
    assert options < {*command}
    assert not [word for word in sbatch_command(job, SlurmResources.of(job, cpus, 8), {}, 60, None) if "gpu" in word]
    with pytest.raises(UserError, match="16 processes do not divide evenly into nodes of 6"):
        SlurmResources.of(job, gpus, 6)


@pytest.mark.parametrize("limit", ["2", "1:60", "0:01:60", "0-0:2"])
def test_a_time_limit_that_leaves_no_time_to_train_is_refused(make_job: Callable[..., Job], limit: str) -> None:
    with pytest.raises(UserError, match=f"--time {limit} is not longer than --grace 120"):
        main(["--inp_dir", str(make_job("a").folder), "--time", limit])


@pytest.mark.parametrize(
    ("recorded", "state", "status"),
    [
        ("running", "PENDING", "pending"),  # its node was lost
        ("cancelled", "PENDING", "pending"),  # it was preempted
        ("timeout", "FAILED", "timeout"),  # it ended before its time limit, after a signal
        ("fail", "OUT_OF_MEMORY", "oom"),
        ("oom", "RUNNING", "oom"),  # it has just ended
        ("cancelled", "COMPLETING", "running"),  # it may have been preempted
        ("running", None, "fail"),
        ("init", "RUNNING", "running"),  # status.txt was deleted
    ],
)
def test_reconcile_status_combines_status_txt_and_slurm(recorded: Any, state: str | None, status: str) -> None:
    assert reconcile_status(recorded, state) == status


def test_sacct_is_queried_for_jobs_that_squeue_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"squeue": "12|RUNNING\n", "sacct": "7|CANCELLED by 1000\n8|OUT_OF_MEMORY\n"}
    commands = []
    monkeypatch.setattr(slurm, "run_slurm", lambda command: commands.append(command) or answers[command[0]])
    assert slurm.query_states(["7", "8", "9", "12"]) == {"12": "RUNNING", "7": "CANCELLED", "8": "OUT_OF_MEMORY"}
    assert commands[1][-1] == "--jobs=7,8,9"
    assert "--me" not in commands[0]  # another user may have submitted jobs of the sweep
    commands.clear()
    assert slurm.query_states(["12"]) == {"12": "RUNNING"}
    assert len(commands) == 1


def test_jobs_are_submitted_in_chains_and_cancelled(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, ids, after, cancelled = [make_job(name) for name in "abc"], iter("789"), [], []

    def run_slurm(command: list[str]) -> str:
        if command[0] == "sbatch":
            after.append([word for word in command if "dependency" in word])
            return next(ids)
        cancelled.extend(command[1:] if command[0] == "scancel" else [])
        return "7|RUNNING\n8|PENDING\n9|PENDING\n"

    monkeypatch.setattr(slurm, "run_slurm", run_slurm)
    sweep = ["--inp_dir", str(jobs[0].folder.parent)]
    main([*sweep, "--nb_slurm_array", "2"])
    assert after == [[], [], ["--dependency=afterany:7"]]
    main([*sweep, "--check_status"])
    assert [job.status for job in jobs] == ["running", "pending", "pending"]
    main([*sweep, "--cancel"])
    assert cancelled == ["9", "8", "7"]


@pytest.mark.processes
def test_invalid_configs_are_all_reported_and_nothing_is_submitted(make_job: Callable[..., Job]) -> None:
    jobs = [make_job("good"), make_job("no_sequence", training__seq_length=0), make_job("x", training__lr=1)]
    output = submit(jobs[0].folder.parent, code=1)
    assert f"  - {jobs[1].config_file}: training.seq_length=0" in output
    assert f"  - {jobs[2].config_file}: unknown key training.lr" in output
    assert "sbatch is not installed" in submit(jobs[0].folder, code=1, PATH="/nowhere")
    assert [job.status for job in jobs] == ["init"] * 3
