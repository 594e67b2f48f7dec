"""Helpers of the tests of sweeps: start jobs, wait for them, find their processes and logs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.program import run
from workbench.sweep import slurm
from workbench.sweep.jobs import Job

SHELL_SYNTAX = "it's $(touch executed) `touch executed` \"; touch executed; \\ %j & *"
"""a name that creates a file `executed` where a shell command contains it without quotes"""
RESUMED = "training resumes from"
"""start of the line that a resumed run logs, before the checkpoint's folder"""


def submit(folder: Path, *options: str, code: int = 0, **variables: str) -> str:
    """Run `python submit_slurm_jobs.py` and check its exit code. Returns its output."""
    done = run("submit_slurm_jobs.py", "--inp_dir", folder, *options, code=code, **variables)
    return done.stdout + done.stderr


def wait_for(condition: Callable[[], Any], job: Job) -> None:
    """Wait until a condition is true. After 200 seconds, fail with the job's logs."""
    end = time.monotonic() + 200
    while not condition():
        logs = [path.read_text() for path in job.folder.glob("log_*.out")]
        assert time.monotonic() < end, "\n".join([f"{job.name} is {job.status}", *logs])
        time.sleep(0.02)


def processes_of(job: Job) -> list[int]:
    """Return the ids of the train.py processes of a job on this machine."""
    ids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has just ended
            continue
        if str(job.config_file) in words and not {"torch.distributed.run", "srun"} & set(words):
            ids.append(int(path.parent.name))
    return ids


def log_of(job: Job) -> str:
    """Read the log of a job's latest run."""
    return slurm.log_file(job).read_text()
