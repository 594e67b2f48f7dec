"""Jobs in the hands of Slurm: submit them, cancel them, and ask what has become of them.

A job's folder gets `job.slurm`, `slurm_job_id.txt` of its latest submission, and `log_ID.out`. Its status has two
authors. The job itself (template/base_job.slurm) says what only it can know, out of memory or just failed; Slurm says
what the job cannot: that it waits, was killed, cancelled, or lost its host.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from picotron.config import Config
from picotron.errors import UserError
from picotron.sweep.jobs import ALIVE, ENDED, OUT_OF_MEMORY, Job, Status

ROOT = Path(__file__).resolve().parents[2]

STATES: dict[Status, str] = {  # of Slurm, as squeue and sacct name them
    "pending": "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    "running": "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED",
    "completed": "COMPLETED",
    "fail": "FAILED BOOT_FAIL LAUNCH_FAILED NODE_FAIL RECONFIG_FAIL REVOKED",
    "oom": "OUT_OF_MEMORY",
    "timeout": "TIMEOUT DEADLINE",
    "cancelled": "CANCELLED PREEMPTED",
}
STATUS_OF_STATE = {state: status for status, states in STATES.items() for state in states.split()}


@dataclass(frozen=True)
class SlurmResources:
    """What a job asks of Slurm."""

    nodes: int
    processes_per_node: int
    cores_per_node: int
    gpus_per_node: int

    @classmethod
    def of(cls, job: Job, config: Config, gpus_per_node: int) -> "SlurmResources":
        """As few nodes as possible, with a process per GPU, or as many processes on the CPU.

        Raises:
            UserError: they do not divide.
        """
        world_size = config.distributed.world_size
        processes = min(world_size, gpus_per_node)
        nodes, rest = divmod(world_size, processes)
        if rest:
            fits = max(n for n in range(1, processes) if world_size % n == 0)
            raise UserError(
                f"{job.config_file}: {world_size} processes do not fill nodes of {gpus_per_node}; "
                f"use --gpus_per_node {fits}, or other sizes in the config"
            )
        cores = processes * (config.environment.OMP_NUM_THREADS + config.dataset.num_workers)
        return cls(nodes, processes, cores, 0 if config.distributed.use_cpu else processes)


def quote(value: Any) -> str:
    """A value as one word for the shell, or a list as several."""
    return shlex.join(value) if isinstance(value, list) else shlex.quote(str(value))


def render(job: Job, resources: SlurmResources, env_setup: Path | None, grace: int) -> str:
    """The batch script of a job. A name that the template has and this has not is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "template"),
        undefined=jinja2.StrictUndefined,
        finalize=quote,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("base_job.slurm").render(
        job_folder=job.folder,
        env_setup=env_setup,
        python=sys.executable,
        nodes=resources.nodes,
        processes_per_node=resources.processes_per_node,
        cores_per_node=resources.cores_per_node,
        grace=grace,
        train=ROOT / "train.py",
        arguments=["--config", str(job.config_file), *job.overrides],
        out_of_memory=OUT_OF_MEMORY,
    )


def sbatch_command(
    job: Job, resources: SlurmResources, options: dict[str, str], grace: int, after: str | None
) -> list[str]:
    """How to submit a job.

    Args:
        options: more of them for sbatch, by name.
        grace: seconds before the time limit at which the run is told to write a checkpoint.
        after: the id of a job to wait for, however it ends: jobs of a sweep do not build on each other's results, so
            that one fails (afterok would let the rest of its chain wait for ever) is no reason not to run the next.
    """
    command = ["sbatch", "--parsable", f"--job-name={job.folder.name}"]
    # The job opens its log by itself: for sbatch that would be a pattern, in which a folder's % or \ meant something.
    command += ["--output=/dev/null", "--requeue"]
    command += [f"--nodes={resources.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={resources.cores_per_node}"]
    command += [f"--signal=B:USR1@{grace}"]
    if resources.gpus_per_node:
        command += [f"--gres=gpu:{resources.gpus_per_node}"]
    if after:
        command += [f"--dependency=afterany:{after}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    return [*command, str(job.folder / "job.slurm")]


def run_slurm(command: list[str]) -> str:
    """What one of Slurm's programs prints.

    Raises:
        UserError: there is none, or it complains.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UserError(f"there is no {command[0]} on this machine; go where Slurm is, or use --local") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"{command[0]} says: {error.stderr.strip()}") from None


def submit(job: Job, command: list[str]) -> str:
    """Give a job to Slurm, which is then pending. Returns its id there."""
    before = job.status
    job.set_status("pending")  # first, since the job may start, and write "running", before sbatch returns
    try:
        job_id = run_slurm(command).strip().partition(";")[0]  # of ID;CLUSTER
    except UserError as error:
        job.set_status(before)
        raise UserError(f"{job.folder} was not submitted: {error}") from None
    (job.folder / "slurm_job_id.txt").write_text(job_id + "\n")
    return job_id


def cancel(job: Job, job_id: str) -> None:
    run_slurm(["scancel", job_id])
    job.set_status("cancelled")


def slurm_job_id(job: Job) -> str | None:
    """Of its latest submission; None if the job was not given to Slurm."""
    file = job.folder / "slurm_job_id.txt"
    return file.read_text().strip() if file.exists() else None


def log_file(job: Job) -> Path:
    """What the job's latest run printed."""
    return job.folder / f"log_{slurm_job_id(job) or 'local'}.out"


def query_states(ids: list[str]) -> dict[str, str]:
    """The states of jobs by id. squeue knows the present ones and those of the last minutes, sacct, where Slurm keeps
    accounts, all; of what neither knows there is nothing.
    """
    lines = run_slurm(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T"]).splitlines()
    states = dict(line.split("|") for line in lines)
    if forgotten := sorted(set(ids) - set(states)):
        try:
            output = run_slurm(["sacct", "-XPn", "--format=JobIDRaw,State", f"--jobs={','.join(forgotten)}"])
        except UserError:
            output = ""  # no sacct, or no accounts
        states |= {job_id: state.split()[0] for job_id, state in (line.split("|") for line in output.splitlines())}
    return states


def reconcile_status(says: Status, state: str | None) -> Status:
    """The status of a job whose status.txt says one thing and Slurm another (None: that it knows of no such job)."""
    if state is None:
        slurm_says: Status = "fail"  # it did not live to say how it ended
    else:
        slurm_says = STATUS_OF_STATE.get(state, "running")  # a later Slurm's word for who knows what: leave it alone
    if slurm_says == "fail" and says in ENDED:
        return says  # the job itself knows better why it failed
    if slurm_says == "running" and says in ENDED and says != "cancelled":
        return says  # it has just ended; but a signal to end may also mean that Slurm puts it into the queue again
    return slurm_says


def update_statuses(jobs: list[Job]) -> None:
    """Correct what status.txt says, where the job could not.

    Raises:
        UserError: Slurm does not answer.
    """
    before = {job: (slurm_job_id(job), job.status) for job in jobs}
    ids = [job_id for job_id, _ in before.values() if job_id]
    states = query_states(ids) if ids else {}
    for job, (job_id, says) in before.items():
        with job.claim() as claim:
            if claim is None or (slurm_job_id(job), job.status) != (job_id, says):
                continue  # someone else sees to it just now
            now = says
            if job_id:
                now = reconcile_status(says, states.get(job_id))
            elif says in ALIVE:  # on this machine, but nobody runs it any more
                now = "fail"
            if now != says:
                job.set_status(now)
