"""What tests of sweeps do with jobs: submit them, wait for them, look for their processes and logs."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from picotron.sweep import slurm
from picotron.sweep.jobs import Job

NASTY = "it's $(touch executed) `touch executed` \"; touch executed; \\ %j & *"


def program(folder: Path, *options: str, environment: dict[str, str], code: int = 0) -> str:
    """`python submit_slurm_jobs.py`; what it prints."""
    command = [sys.executable, "submit_slurm_jobs.py", "--inp_dir", str(folder), *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def wait_for(condition: Callable[[], Any], job: Job) -> None:
    """Until it is true; else the test shows the job's logs."""
    end = time.monotonic() + 200
    while not condition():
        logs = [path.read_text() for path in job.folder.glob("log_*.out")]
        assert time.monotonic() < end, "\n".join([f"{job.name} is {job.status}", *logs])
        time.sleep(0.02)


def processes_of(job: Job) -> list[int]:
    """The ids of the processes on this machine that train it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if str(job.config_file) in words and not {"torch.distributed.run", "srun"} & set(words):
            found.append(int(path.parent.name))
    return found


def log_of(job: Job) -> str:
    return slurm.log_file(job).read_text()
