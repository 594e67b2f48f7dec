"""Sweeps on Slurm: submit jobs, cancel them, and query their states.

Submission writes `job.slurm` and `slurm_job_id.txt` (of the latest submission) to a job's folder, and the job writes
`log_ID.out`. The status of a job combines two sources. Only the batch script (template/base_job.slurm) can distinguish
a run that is out of memory from another failure. Only Slurm knows that a job is pending, was killed or cancelled, or
lost its node.
"""

import math
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from picotron.config import Config
from picotron.console import UserError
from workbench.files import write_atomically
from workbench.sweep.jobs import ACTIVE, ENDED, OUT_OF_MEMORY, STOPPED, TRAIN, Job, Status, read_word, stop_options

STATES: dict[Status, str] = {  # the job states of Slurm, as squeue and sacct print them
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
    """The resources that a job requests from Slurm."""

    nodes: int
    processes_per_node: int
    cores_per_node: int
    gpus_per_node: int

    @classmethod
    def of(cls, job: Job, config: Config, gpus_per_node: int) -> "SlurmResources":
        """Compute the smallest number of nodes for a job, with one process per GPU.

        Args:
            gpus_per_node: maximum number of processes per node, also for runs on the CPU.

        Raises:
            UserError: the processes do not divide evenly into nodes.
        """
        world_size = config.distributed.world_size
        processes = min(world_size, gpus_per_node)
        nodes, rest = divmod(world_size, processes)
        if rest:
            fits = max(n for n in range(1, processes) if world_size % n == 0)
            raise UserError(
                f"{job.config_file}: {world_size} processes do not divide evenly into nodes of {gpus_per_node}; "
                f"use --gpus_per_node {fits}, or other sizes in the config"
            )
        cores = processes * config.environment.OMP_NUM_THREADS
        return cls(nodes, processes, cores, 0 if config.distributed.use_cpu else processes)


def quote(value: Any) -> str:
    """Quote a value as one word of a shell command, or a list as several words."""
    return shlex.join(value) if isinstance(value, list) else shlex.quote(str(value))


def render(job: Job, config: Config, resources: SlurmResources, env_setup: Path | None, grace: int) -> str:
    """Render the batch script of a job. An undefined name in the template is an error.

    Args:
        env_setup: shell script that the job sources first.
        grace: time in seconds that torchrun gives the run to end after a signal.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TRAIN.parent / "template"),
        undefined=jinja2.StrictUndefined,
        finalize=quote,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("base_job.slurm").render(
        job_folder=job.folder,
        env_setup=env_setup,
        python=sys.executable,
        **vars(resources),
        stop_options=stop_options(grace),
        train=TRAIN,
        arguments=job.arguments(config),
        stopped=STOPPED,
        out_of_memory=OUT_OF_MEMORY,
    )


def seconds_of(limit: str) -> float:
    """Return the seconds of a time limit in one of sbatch's forms, infinity if it has another form or is 0."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)):
        return math.inf
    days, *numbers = (int(each or 0) for each in found.groups())
    unit = 3600 if found[1] or found[4] else 60  # of the first number: hours, or minutes
    return 86400 * days + sum(number * unit / 60**i for i, number in enumerate(numbers)) or math.inf


def sbatch_command(
    job: Job, resources: SlurmResources, options: dict[str, str], grace: int, after: str | None
) -> list[str]:
    """Return the command that submits a job.

    Args:
        options: further options of sbatch by name.
        grace: time in seconds before the time limit at which Slurm signals the run to write a checkpoint.
        after: id of a job to wait for, or None. The dependency is afterany, because jobs of a sweep do not need each
            other's results: with afterok, a failed job would leave the rest of its chain pending forever.
    """
    # The batch script opens its log file: sbatch would interpret a % or \ in the folder's name as part of a pattern.
    command = ["sbatch", "--parsable", f"--job-name={job.folder.name}", "--output=/dev/null", "--requeue"]
    command += [f"--nodes={resources.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={resources.cores_per_node}"]
    command += [f"--signal=B:USR1@{grace}"]
    if resources.gpus_per_node:
        command += [f"--gres=gpu:{resources.gpus_per_node}"]
    if after:
        command += [f"--dependency=afterany:{after}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    return [*command, str(job.folder / "job.slurm")]


def run_slurm(command: list[str]) -> str:
    """Run one of Slurm's programs. Returns its output.

    Raises:
        UserError: the program is not installed, or it fails.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed; use a machine with Slurm, or --local") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"{command[0]} failed: {error.stderr.strip()}") from None


def submit(job: Job, command: list[str]) -> str:
    """Submit a job to Slurm and set its status to pending. Returns its Slurm job id."""
    before = job.status
    job.set_status("pending")  # before sbatch, because the job may start, and write "running", before sbatch returns
    try:
        job_id = run_slurm(command).strip().partition(";")[0]  # the output is ID or ID;CLUSTER
    except UserError as error:
        job.set_status(before)
        raise UserError(f"{job.folder} was not submitted: {error}") from None
    write_atomically(job.folder / "slurm_job_id.txt", job_id + "\n")
    return job_id


def cancel(job: Job, job_id: str) -> None:
    """Cancel a job that was submitted to Slurm."""
    run_slurm(["scancel", job_id])
    job.set_status("cancelled")


def slurm_job_id(job: Job) -> str | None:
    """Id of the job's latest submission to Slurm; None if it was not submitted."""
    word = read_word(job.folder / "slurm_job_id.txt")
    return word if re.fullmatch(r"[0-9]+", word) else None


def log_file(job: Job) -> Path:
    """The file with the output of the job's latest run."""
    return job.folder / f"log_{slurm_job_id(job) or 'local'}.out"


def query_states(ids: list[str]) -> dict[str, str]:
    """Return Slurm's states of jobs by id. squeue lists current jobs and those that ended in the last minutes; sacct
    lists all jobs if Slurm has accounting enabled. Jobs that neither lists are omitted.
    """
    lines = run_slurm(["squeue", "--noheader", "--states=all", "--format=%i|%T"]).splitlines()
    states = dict(line.split("|") for line in lines)
    if not_listed := sorted(set(ids) - set(states)):
        try:
            output = run_slurm(["sacct", "-XPn", "--format=JobIDRaw,State", f"--jobs={','.join(not_listed)}"])
        except UserError:
            output = ""  # no sacct, or no accounting
        states |= {job_id: state.split()[0] for job_id, state in (line.split("|") for line in output.splitlines())}
    return states


def reconcile_status(recorded: Status, state: str | None) -> Status:
    """Decide the status of a job from two sources.

    Args:
        recorded: the status in status.txt.
        state: Slurm's state of the job, or None if Slurm does not know the job.
    """
    if state is None:
        reported: Status = "fail"  # the job ended before it could record how
    else:
        reported = STATUS_OF_STATE.get(state, "running")  # a state of a later version of Slurm: leave the job alone
    if reported == "fail" and recorded in ENDED:
        return recorded  # the batch script knows more precisely why the run failed
    if reported == "running" and recorded in ENDED and recorded != "cancelled":
        return recorded  # the job has just ended. After "cancelled" it may still run, or be requeued by Slurm
    return reported


def update_statuses(jobs: list[Job]) -> None:
    """Correct the status of jobs that could not record it themselves.

    Raises:
        UserError: Slurm's programs are not installed, or fail.
    """
    before = {job: (slurm_job_id(job), job.status) for job in jobs}
    ids = [job_id for job_id, status in before.values() if job_id and status != "completed"]
    states = query_states(ids) if ids else {}
    for job, (job_id, recorded) in before.items():
        status = recorded
        if job_id in ids:
            status = reconcile_status(recorded, states.get(job_id))
        elif not job_id and recorded in ACTIVE:  # a job of this machine whose runner was killed
            status = "fail"
        if status == recorded:  # claim nothing that another process may want to start
            continue
        with job.claim() as claim:
            if claim is not None and (slurm_job_id(job), job.status) == (job_id, recorded):
                job.set_status(status)
