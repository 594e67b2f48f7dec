"""Run the jobs of a sweep, on Slurm or on this machine:

    python submit_slurm_jobs.py --inp_dir sweeps/sizes --time 02:00:00
    python submit_slurm_jobs.py --inp_dir sweeps/sizes --local

Each folder with a config.json is a job, see workbench/sweep/jobs.py. Jobs that have never run are submitted, or with
--only the jobs of other statuses, which resume from their newest checkpoint. Jobs that are pending or running are
never submitted again. Set other options of sbatch by its environment variables, such as SBATCH_MEM_PER_NODE.
"""

import argparse
import shlex
import sys
from collections import Counter
from pathlib import Path

from picotron.config import Config
from picotron.console import UserError
from workbench.console import number, print_line
from workbench.files import write_atomically
from workbench.run.config_reader import load_config
from workbench.sweep.jobs import ACTIVE, STATUSES, Job, find_jobs
from workbench.sweep.local_jobs import run_local_jobs
from workbench.sweep.slurm import (
    SlurmResources,
    cancel,
    log_file,
    render,
    sbatch_command,
    seconds_of,
    slurm_job_id,
    submit,
    update_statuses,
)

SBATCH_OPTIONS = ("qos", "partition", "time", "account")
ACTIONS = {  # the options of each action
    "submit": [*SBATCH_OPTIONS, "env_setup", "gpus_per_node", "nb_slurm_array", "grace", "dry_run"],
    "local": ["timeout", "grace", "dry_run"],
    "cancel": ["dry_run"],
    "check_status": [],
}


def describe(action: str) -> str:
    return "when submitting to Slurm" if action == "submit" else f"with --{action}"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, with the chosen action as `action`.

    Raises:
        UserError: an option cannot be used with the action.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    statuses = f"select jobs by status: {', '.join(STATUSES)} [init; with --cancel: pending running]"
    grace = (
        "time that a run has to write a checkpoint: it is signalled this long before Slurm's time limit, "
        "or killed this long after --timeout"
    )
    add("--inp_dir", type=Path, required=True, metavar="DIR", help="a sweep, or one job of it")
    add("--only", nargs="+", choices=STATUSES, metavar="STATUS", help=statuses)
    add("--dry_run", action="store_true", help="print commands without running them; on Slurm, write each job.slurm")
    add("--grace", type=int, metavar="SECONDS", help=f"{grace} [120]")
    add(
        "--timeout", type=number(float, 1e-3), metavar="SECONDS", help="with --local, time limit of each job [no limit]"
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--check_status", action="store_true", help="count jobs by status, and list those of --only")
    actions.add_argument("--cancel", action="store_true", help="cancel pending and running jobs")
    actions.add_argument("--local", action="store_true", help="run jobs on this machine, one after the other")
    add = parser.add_argument_group("on Slurm").add_argument
    add("--qos", metavar="Q", help="quality of service, see sbatch")
    add("--partition", metavar="P", help="see sbatch")
    add("--time", metavar="T", help="time limit of each job, see sbatch: minutes, or hours:minutes:seconds")
    add("--account", metavar="A", help="see sbatch")
    add("--env_setup", type=Path, metavar="FILE", help="shell script that each job sources first")
    add("--gpus_per_node", type=int, metavar="N", help="processes per node, on GPUs or on the CPU [8]")
    add("--nb_slurm_array", type=int, metavar="N", help="run at most N jobs at the same time [no limit]")
    options = parser.parse_args(arguments)

    options.action = next((name for name in ACTIONS if getattr(options, name, False)), "submit")
    for name in dict.fromkeys(name for names in ACTIONS.values() for name in names):
        value = getattr(options, name)
        if value and name not in ACTIONS[options.action]:
            others = [describe(action) for action, names in ACTIONS.items() if name in names]
            raise UserError(
                f"--{name} cannot be used {describe(options.action)}, only {' or '.join(others)}; remove it"
            )
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise UserError(f"--{name} {value} should be greater than 0")
    if options.env_setup and not options.env_setup.is_file():
        raise UserError(f"--env_setup {options.env_setup} is not a file; give the path of a shell script")
    return options


def read_config(job: Job) -> Config:
    """Read and check the config of a job, with the overrides of its run."""
    return load_config(job.arguments(load_config(["--config", str(job.config_file)])))


def read_configs(jobs: list[Job]) -> dict[Job, Config]:
    """Read and check the configs of jobs.

    Raises:
        UserError: the mistakes of all configs.
    """
    configs, mistakes = {}, []
    for job in jobs:
        try:
            configs[job] = read_config(job)
        except UserError as error:
            mistakes += [f"{job.config_file}: {problem}" for problem in error.problems]
    if mistakes:
        raise UserError(*mistakes)
    return configs


def submit_jobs(jobs: dict[Job, Config], all_jobs: list[Job], options: argparse.Namespace) -> None:
    """Submit jobs to Slurm. With --nb_slurm_array N, each job waits for the one submitted N jobs before it."""
    before = {job: job.status for job in jobs}
    resources = {job: SlurmResources.of(job, config, options.gpus_per_node or 8) for job, config in jobs.items()}
    sbatch_options = {name: value for name in SBATCH_OPTIONS if (value := getattr(options, name))}
    env_setup = options.env_setup and options.env_setup.absolute()
    active = [slurm_job_id(job) for job in all_jobs if job.status in ACTIVE]
    queue = sorted((job_id for job_id in active if job_id), key=int)
    for job, config in jobs.items():
        after = queue[-options.nb_slurm_array] if 0 < (options.nb_slurm_array or 0) <= len(queue) else None
        command = sbatch_command(job, resources[job], sbatch_options, options.grace, after)
        write_atomically(job.folder / "job.slurm", render(job, config, resources[job], env_setup, options.grace))
        if options.dry_run:
            print_line(shlex.join(command))
            queue.append(f"ID_OF_{job.name}")
            continue
        with job.claim() as claim:
            if claim is not None and job.status == before[job]:  # otherwise another process has submitted it meanwhile
                queue.append(submit(job, command))
                print_line(f"{job.name}: job {queue[-1]}" + (f", after {after}" if after else ""))


def cancel_jobs(jobs: list[Job], dry_run: bool) -> None:
    """Cancel jobs in reverse order: usually the last of a chain first, so that no waiting job starts meanwhile."""
    for job in reversed(jobs):
        if not (job_id := slurm_job_id(job)):
            print_line(f"{job.name} runs without Slurm; press Ctrl-C where it was started")
        elif dry_run:
            print_line(f"scancel {job_id}")
        else:
            cancel(job, job_id)


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Returns the exit code."""
    options = parse_arguments(arguments)
    options.grace = options.grace or 120
    if seconds_of(options.time or "") <= options.grace:
        raise UserError(
            f"--time {options.time} is not longer than --grace {options.grace}, so that jobs would be stopped at once; use a longer --time"
        )
    all_jobs = find_jobs(options.inp_dir.absolute())
    update_statuses(all_jobs)
    statuses = options.only or (ACTIVE if options.action == "cancel" else ["init"])
    chosen = [job for job in all_jobs if job.status in statuses]
    active = [job for job in chosen if job.status in ACTIVE]
    code = 0
    if options.action == "check_status":
        for job in chosen if options.only else []:
            log = f" ({log_file(job)})" if log_file(job).exists() else ""
            print_line(f"{job.name}: {job.status}{log}")
    elif options.action == "cancel":
        cancel_jobs(active, options.dry_run)
    else:
        for job in active:
            print_line(f"{job.name} is already {job.status}")
        configs = read_configs([job for job in chosen if job not in active])
        if options.action == "submit":
            submit_jobs(configs, all_jobs, options)
        else:
            code = run_local_jobs(configs, options.timeout, options.grace, options.dry_run)
    counts = Counter(job.status for job in all_jobs)
    for status in [each for each in STATUSES if each != "unknown" or counts[each]]:
        print_line(f"{status:10}{counts[status]:6}")
    print_line(f"{'total':10}{len(all_jobs):6}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(
            f"error: {error.filename or 'a file of the sweep'}: {error.strerror}; the jobs' folders must be writable"
        )
