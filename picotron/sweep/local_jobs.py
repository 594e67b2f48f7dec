"""A sweep without Slurm: its jobs on this machine, one after the other, with the same status files."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

from picotron.config import Config
from picotron.sweep.jobs import OUT_OF_MEMORY, Job, Status

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def torchrun_command(job: Job, config: Config, grace: int) -> list[str]:
    """What runs a job on this machine; --standalone finds a port that is free."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node", str(config.distributed.world_size)]
    torchrun += ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", str(grace)]
    return [*torchrun, str(TRAIN), "--config", str(job.config_file), *job.overrides]


def stop(process: subprocess.Popen[bytes], grace: int) -> None:
    """If it still runs, ask torchrun to let the run write a checkpoint and end, or kill it after `grace` seconds."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)  # impatience would leave processes behind
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(grace + 30)
    except subprocess.TimeoutExpired:  # so torchrun itself is stuck
        process.kill()
        process.wait()


def run_job(job: Job, config: Config, timeout: float | None, grace: int, claim: int) -> None:
    """Run a job to its end. Whatever that is, also Ctrl-C, its status says so.

    Should this process be killed, torchrun goes on, and so does the claim.
    """
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    (job.folder / "slurm_job_id.txt").unlink(missing_ok=True)  # Slurm has nothing to say about it any more
    job.set_status("running")
    with (job.folder / "log_local.out").open("a+b") as log:
        start, ended = log.tell(), None
        # In a session of its own, so that Ctrl-C comes to this process alone, which passes it on.
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
    """Run jobs one after the other, with a line for each.

    Args:
        timeout: seconds for each of them.
        grace: seconds that a run gets after that, or after Ctrl-C, to write a checkpoint.
        dry_run: only print the commands.

    Returns:
        An exit code: 0 if all have completed, 130 after Ctrl-C.
    """
    before = {job: job.status for job in jobs}
    for job, config in jobs.items():
        if dry_run:
            print(shlex.join(torchrun_command(job, config, grace)))
            continue
        with job.claim() as claim:
            if claim is None or job.status != before[job]:
                print(f"{job.name}: someone else runs it")
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
