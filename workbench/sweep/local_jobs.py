"""Sweeps without Slurm: run jobs on this machine, one after the other, with the same status files."""

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import IO

from picotron.config import Config
from workbench.console import print_line
from workbench.run.stop_signals import StopSignals
from workbench.sweep.jobs import OUT_OF_MEMORY, STOPPED, TRAIN, Job, Status


def command(job: Job, config: Config) -> list[str]:
    """Return the command that runs a job on this machine."""
    return [sys.executable, str(TRAIN), *job.arguments(config)]


def stop(process: subprocess.Popen[bytes], grace: int) -> None:
    """Stop a run. It writes a checkpoint and ends; after `grace` seconds, all its processes are killed."""
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_job(
    job: Job, config: Config, timeout: float | None, grace: int, claim: IO[str], interrupt: StopSignals
) -> None:
    """Run a job and record in its status how it ended.

    If this process is killed, the job keeps running, and the claim lasts as long as the job.

    Args:
        timeout: time limit in seconds, or None.
        grace: see `run_local_jobs`.
        claim: the file that `Job.claim` yields, whose descriptor the job inherits.
        interrupt: ends the job early.
    """
    (job.folder / "slurm_job_id.txt").unlink(missing_ok=True)  # Slurm no longer knows the state of this job
    job.set_status("running")
    with open(job.folder / "log_local.out", "a+b") as log:
        start, end = log.tell(), time.monotonic() + (timeout or math.inf)
        # A separate session, so that the terminal sends Ctrl-C to this process only, which then stops the job.
        process = subprocess.Popen(
            command(job, config),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[claim.fileno()],
        )
        stopped: Status | None = None
        while process.poll() is None:
            if interrupt.received or time.monotonic() > end:
                stopped = "cancelled" if interrupt.received else "timeout"
                stop(process, grace)
            else:
                time.sleep(0.1)
        log.seek(start)
        text = log.read().decode(errors="replace")
        failed: Status = (
            "cancelled" if re.search(STOPPED, text) else "oom" if re.search(OUT_OF_MEMORY, text) else "fail"
        )
        job.set_status((stopped or failed) if process.returncode else "completed")


def run_local_jobs(jobs: dict[Job, Config], timeout: float | None, grace: int, dry_run: bool) -> int:
    """Run jobs one after the other, and print a line for each.

    Args:
        jobs: the jobs and their configs.
        timeout: time limit of each job in seconds, or None.
        grace: time in seconds that a run has to write a checkpoint, after its time limit or Ctrl-C.
        dry_run: whether to print the commands only.

    Returns:
        The exit code: 0 if all jobs have completed, 130 after Ctrl-C, 1 otherwise.
    """
    before = {job: job.status for job in jobs}
    with contextlib.closing(StopSignals()) as interrupt:
        for job, config in jobs.items():
            if interrupt.received:
                break
            if dry_run:
                print_line(shlex.join(command(job, config)))
                continue
            with job.claim() as claim:
                if claim is None or job.status != before[job]:
                    print_line(f"{job.name}: skipped, another process has started or submitted it")
                    continue
                start = time.monotonic()
                print_line(f"{job.name}: ", end="")
                run_job(job, config, timeout, grace, claim, interrupt)
                print_line(f"{job.status}, {time.monotonic() - start:.0f} s")
    if interrupt.received:
        return 130
    return 0 if dry_run or all(job.status == "completed" for job in jobs) else 1
