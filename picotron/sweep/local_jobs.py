"""Sweeps without Slurm: run jobs on this machine, one after the other, with the same status files."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

from picotron.config import Config
from picotron.files import create
from picotron.sweep.jobs import OUT_OF_MEMORY, Job, Status, stop_options

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def torchrun_command(job: Job, config: Config, grace: int) -> list[str]:
    """Return the command that runs a job on this machine. (--standalone makes torchrun find a free port.)"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", str(config.distributed.world_size)]
    torchrun += stop_options(grace)
    return [*torchrun, str(TRAIN), "--config", str(job.config_file), *job.overrides]


def stop(process: subprocess.Popen[bytes], grace: int) -> None:
    """Stop a torchrun process if it is still running. torchrun forwards the signal, and the run writes a checkpoint and
    ends; after `grace` seconds, torchrun kills the run.
    """
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would end this process and leave the run behind
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(grace + 30)
    except subprocess.TimeoutExpired:  # torchrun itself is stuck
        process.kill()
        process.wait()


def run_job(job: Job, config: Config, timeout: float | None, grace: int, claim: int) -> None:
    """Run a job and record in its status how it ended, even after Ctrl-C.

    If this process is killed, torchrun keeps running, and the claim lasts as long as torchrun.

    Args:
        timeout: time limit in seconds, or None.
        grace: see `run_local_jobs`.
        claim: the descriptor that `Job.claim` yields, which torchrun inherits.
    """
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    (job.folder / "slurm_job_id.txt").unlink(missing_ok=True)  # Slurm no longer knows the state of this job
    job.set_status("running")
    with open(job.folder / "log_local.out", "a+b", opener=create) as log:
        start, ended = log.tell(), None
        # A separate session, so that the terminal sends Ctrl-C to this process only, which then stops torchrun.
        process = subprocess.Popen(
            torchrun_command(job, config, grace),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[claim],
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = "timeout"
        except KeyboardInterrupt:
            ended = "cancelled"
            raise
        finally:
            stop(process, grace)
            log.seek(start)
            failed = "oom" if re.search(OUT_OF_MEMORY.encode(), log.read()) else "fail"
            job.set_status(cast(Status, ended or failed) if process.returncode else "completed")


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
    for job, config in jobs.items():
        if dry_run:
            print(shlex.join(torchrun_command(job, config, grace)))
            continue
        with job.claim() as claim:
            if claim is None or job.status != before[job]:
                print(f"{job.name}: skipped, another process has started or submitted it")
                continue
            start = time.monotonic()
            print(f"{job.name}: ", end="", flush=True)
            try:
                run_job(job, config, timeout, grace, claim)
            except KeyboardInterrupt:
                return 130
            finally:
                print(f"{job.status}, {time.monotonic() - start:.0f} s", flush=True)
    return 0 if dry_run or all(job.status == "completed" for job in jobs) else 1
