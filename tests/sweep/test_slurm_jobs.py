"""Sweeps on a real Slurm, with a model that trains within seconds; batch scripts, sbatch commands, and statuses."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.oracle import assert_close
from extract_metrics import main as extract_metrics
from picotron.command_line import parse_config
from picotron.console import UserError
from picotron.run.run_folder import checkpoint_folders
from picotron.sweep import slurm
from picotron.sweep.jobs import Job
from picotron.sweep.slurm import SlurmResources, reconcile_status, render, sbatch_command
from submit_slurm_jobs import parse_arguments, read_config
from tests.support.jobs import RESUMED, SHELL_SYNTAX, log_of, processes_of, run_program, wait_for
from tests.support.program import metrics, same_records
from tests.support.slurm_cluster import NoSlurmError, slurm_cluster

JOB_ID = re.compile(r"^(.+): job (\d+)", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables with which programs use a real Slurm."""
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
            yield environment | {"HOME": str(home)}
    except NoSlurmError as error:
        pytest.skip(str(error))


def show_job(job_id: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the fields that `scontrol show job` prints for a job that Slurm still remembers."""
    command = ["scontrol", "show", "job", "--oneliner", job_id]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in output.split() if "=" in word)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sweep_on_slurm_ends_with_the_right_statuses(
    cluster: dict[str, str], make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Six jobs: on two nodes, with shell syntax in its name, without data, cancelled, killed, and slow."""
    two_nodes = make_job("1_two_nodes", distributed__dp_size=2, training__micro_batch_size=2)
    quoted = make_job(f"2 {SHELL_SYNTAX}")
    fails = make_job("3_fails", dataset__name=str(tmp_path / "later.txt"))
    cancelled = make_job("4_cancelled")
    killed = make_job("5_killed", checkpoint__save_frequency=1)
    sweep, setup = two_nodes.folder.parent, tmp_path / SHELL_SYNTAX
    setup.write_text("echo the environment is set up\n")

    def submit(*options: str, folder: Path = sweep) -> dict[str, str]:
        """Run submit_slurm_jobs.py. Returns the Slurm ids of the jobs that it submits, by name."""
        return dict(JOB_ID.findall(run_program(folder, *options, environment=cluster)))

    # Two chains, 1, 3, 5 and 2, 4, and later a job outside the chains that would take an hour.
    options = ["--gpus_per_node", "1", "--nb_slurm_array", "2", "--env_setup", str(setup)]
    ids = submit(*options)
    assert list(ids) == [job.name for job in (two_nodes, quoted, fails, cancelled, killed)]
    slow = make_job("6_slow", training__total_train_steps=1_000_000)
    ids |= submit("--time", "30", "--grace", "60")
    assert list(ids)[5:] == [slow.name]
    assert submit() == submit("--only", "pending", "running") == {}

    assert cancelled.status == "pending"
    assert "cancelled      1" in run_program(cancelled.folder, "--cancel", environment=cluster)

    wait_for(lambda: (slow.run_folder / "metrics.jsonl").exists(), slow)
    minutes, seconds = map(int, show_job(ids[slow.name], cluster)["RunTime"].split(":")[1:])
    limit = math.ceil(minutes + (seconds + 30) / 60)  # 30 to 90 seconds from now, however busy this machine is
    command = ["scontrol", "update", f"jobid={ids[slow.name]}", f"timelimit={limit}"]
    subprocess.run(command, env=cluster, check=True)

    wait_for(lambda: fails.status == "fail", fails)
    (tmp_path / "later.txt").write_text("text " * 999)
    assert list(submit("--only", "fail")) == [fails.name]

    wait_for(lambda: checkpoint_folders(killed.run_folder), killed)
    os.kill(processes_of(killed)[0], signal.SIGKILL)
    wait_for(lambda: killed.status == "fail", killed)
    killed_step = max(checkpoint_folders(killed.run_folder))
    assert killed_step < 20
    assert list(submit("--only", "fail")) == [killed.name]

    wait_for(lambda: slow.status == "timeout", slow)
    fields = show_job(ids[slow.name], cluster)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0")
    resumed = f"{RESUMED} {slow.run_folder}/step_{max(checkpoint_folders(slow.run_folder)):08d}"
    assert list(submit("--only", "timeout")) == [slow.name]
    wait_for(lambda: slurm.log_file(slow).exists() and resumed in log_of(slow), slow)
    assert slow.status == "running"
    run_program(slow.folder, "--only", "running", "--cancel", environment=cluster)

    for job in (two_nodes, quoted, fails, killed):
        wait_for(lambda job=job: job.status == "completed", job)

    def counts() -> list[tuple[str, str]]:
        return re.findall(r"(\w+) +([1-9]\d*)", run_program(sweep, "--check_status", environment=cluster))

    # A cancelled job runs until it has written its checkpoint.
    wait_for(lambda: counts() == [("completed", "4"), ("cancelled", "2"), ("total", "6")], slow)
    extract_metrics(["--inp_dir", str(sweep)])
    with (sweep / "metrics.csv").open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert {name: row["status"] for name, row in rows.items()} == {
        job.name: job.status for job in (two_nodes, quoted, fails, cancelled, killed, slow)
    }
    assert [rows[job.name]["step"] for job in (two_nodes, quoted, fails, cancelled, killed)] == ["20"] * 3 + ["", "20"]
    assert all((sweep / f"{plot}.png").exists() for plot in ("loss", "throughput", "memory"))

    assert show_job(ids[two_nodes.name], cluster)["NumNodes"] == "2"
    assert_close(*([line["loss"] for line in metrics(job.run_folder)] for job in (two_nodes, quoted)))
    assert f"{RESUMED} {killed.run_folder}/step_{killed_step:08d}" in log_of(killed)
    assert same_records(killed.run_folder, quoted.run_folder)
    assert "the environment is set up" in log_of(quoted)
    assert not list(tmp_path.rglob("executed"))
    assert not Path("executed").exists()
    first, second, third = (show_job(ids[job.name], cluster) for job in (two_nodes, fails, killed))
    assert first["EndTime"] <= second["StartTime"]
    assert second["EndTime"] <= third["StartTime"]


@pytest.mark.processes
def test_batch_script_quotes_names_with_shell_syntax(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """srun gets every word unchanged, and no part of a name is executed."""
    job = make_job(SHELL_SYNTAX + "\nnext line")
    setup = tmp_path / f"{SHELL_SYNTAX}.sh"
    setup.write_text("srun() { printf '%s\\0' \"$@\" > words; }\n")
    (tmp_path / "job.slurm").write_text(render(job, read_config(job), SlurmResources(2, 4, 8, 0), setup, 77))
    environment = {**os.environ, "SLURM_JOB_ID": "15003"}
    subprocess.run(["bash", "job.slurm"], cwd=tmp_path, env=environment, check=True)
    assert slurm.log_file(job).parent.joinpath("log_15003.out").read_text() == ""
    assert job.status == "completed"
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    options, torchrun, arguments = words[:4], words[4:-7], words[-7:]
    assert options == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"]
    assert torchrun[:7] == [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "4"]
    assert torchrun[torchrun.index("--rdzv_endpoint") + 1].endswith(":15003")
    assert re.fullmatch("15003-[0-9a-f]{32}", run_id := torchrun[torchrun.index("--rdzv_id") + 1])
    subprocess.run(["bash", "job.slurm"], cwd=tmp_path, env=environment, check=True)
    assert run_id not in (tmp_path / "words").read_text()  # a new one for each run
    assert torchrun[-1] == "77"
    assert arguments == [
        str(Path("train.py").absolute()),
        "--config",
        str(job.config_file),
        *job.overrides(read_config(job)),
    ]
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("srun", "code", "status"),
    [
        ("true", 0, "completed"),
        ("return 3", 3, "fail"),
        ("echo torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; return 1", 1, "oom"),
        ("echo slurmstepd: error: Detected 1 oom-kill event in StepId=7.0; return 137", 137, "oom"),
        ("kill -USR1 $$; sleep 0.2; return 1", 1, "timeout"),
        ("kill -USR1 $$; sleep 0.2", 0, "completed"),  # the run has ended in time
        ("kill -TERM $$; sleep 0.2; return 1", 1, "cancelled"),
        ("kill -USR1 $$; sleep 0.2; kill -TERM $$; sleep 0.2; return 1", 1, "timeout"),
    ],
)
def test_batch_script_records_how_the_run_ended(
    make_job: Callable[..., Job], tmp_path: Path, srun: str, code: int, status: str
) -> None:
    job, setup = make_job("job"), tmp_path / "setup.sh"
    setup.write_text(f"srun() {{ trap '' USR1; {srun}; }}\n")
    (tmp_path / "job.slurm").write_text(render(job, read_config(job), SlurmResources(1, 1, 1, 0), setup, 77))
    result = subprocess.run(["bash", "job.slurm"], cwd=tmp_path, env={**os.environ, "SLURM_JOB_ID": "7"})
    assert (result.returncode, job.status) == (code, status)


@pytest.mark.processes
@pytest.mark.parametrize(("code", "status"), [(0, "completed"), (1, "timeout")])
def test_batch_script_records_how_a_run_ended_while_it_was_signalled(
    make_job: Callable[..., Job], tmp_path: Path, code: int, status: str
) -> None:
    """The signal interrupts `wait`, and the run ends before the script can look at it again."""
    job, setup = make_job("job"), tmp_path / "setup.sh"
    run = f"srun() {{ trap '' USR1; builtin kill -USR1 $$; sleep 0.1; return {code}; }}\n"
    setup.write_text(run + 'kill() { builtin kill "$@" && sleep 0.5; }\n')
    (tmp_path / "job.slurm").write_text(render(job, read_config(job), SlurmResources(1, 1, 1, 0), setup, 77))
    result = subprocess.run(["bash", "job.slurm"], cwd=tmp_path, env={**os.environ, "SLURM_JOB_ID": "7"})
    assert (result.returncode, job.status) == (code, status)


def test_sbatch_command_requests_nodes_cores_and_gpus(make_job: Callable[..., Job]) -> None:
    job = make_job("job")
    gpus = parse_config(
        {"distributed": {"dp_size": 4, "tp_size": 4}, "environment": {"OMP_NUM_THREADS": 3}}
        | {section: json.loads(job.config_file.read_text())[section] for section in ("model", "dataset")}
    )
    assert SlurmResources.of(job, gpus, 8) == SlurmResources(
        nodes=2, processes_per_node=8, cores_per_node=24, gpus_per_node=8
    )
    assert SlurmResources.of(job, gpus, 64) == SlurmResources(1, 16, 48, 16)
    command = sbatch_command(job, SlurmResources.of(job, gpus, 8), {"qos": "a b", "time": "2:00:00"}, 60, after="7")
    assert {"--gres=gpu:8", "--qos=a b", "--time=2:00:00", "--signal=B:USR1@60", "--dependency=afterany:7"} < set(
        command
    )
    cpu = parse_config(json.loads(job.config_file.read_text()))
    assert not [word for word in sbatch_command(job, SlurmResources.of(job, cpu, 8), {}, 60, None) if "gpu" in word]
    with pytest.raises(
        UserError, match=r"16 processes do not divide evenly into nodes of 6; use --gpus_per_node 4, or"
    ):
        SlurmResources.of(job, gpus, 6)


@pytest.mark.parametrize(
    ("recorded", "state", "status"),
    [
        ("pending", "PENDING", "pending"),
        ("pending", "RUNNING", "running"),
        ("running", "RUNNING", "running"),
        ("running", "PENDING", "pending"),  # its node was lost
        ("cancelled", "PENDING", "pending"),  # it was preempted
        ("running", "COMPLETED", "completed"),
        ("running", "FAILED", "fail"),
        ("timeout", "FAILED", "timeout"),  # it ended before its time limit, after a signal
        ("oom", "FAILED", "oom"),
        ("fail", "OUT_OF_MEMORY", "oom"),
        ("oom", "RUNNING", "oom"),  # it has just ended
        ("completed", "COMPLETING", "completed"),
        ("running", "COMPLETING", "running"),
        ("cancelled", "COMPLETING", "running"),  # it may have been preempted
        ("running", "TIMEOUT", "timeout"),
        ("cancelled", "TIMEOUT", "timeout"),
        ("fail", "CANCELLED", "cancelled"),
        ("running", "NODE_FAIL", "fail"),
        ("running", None, "fail"),
        ("completed", None, "completed"),
        ("pending", "SOMETHING_NEW", "running"),
        ("init", "RUNNING", "running"),  # status.txt was deleted
    ],
)
def test_reconcile_status_combines_status_txt_and_slurm(recorded: Any, state: str | None, status: str) -> None:
    assert reconcile_status(recorded, state) == status


def test_sacct_is_queried_for_jobs_that_squeue_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"squeue": "12|RUNNING\n", "sacct": "7|CANCELLED by 1000\n8|OUT_OF_MEMORY\n"}
    commands: list[list[str]] = []
    monkeypatch.setattr(slurm, "run_slurm", lambda command: commands.append(command) or answers[command[0]])
    assert slurm.query_states(["7", "8", "9", "12"]) == {"12": "RUNNING", "7": "CANCELLED", "8": "OUT_OF_MEMORY"}
    assert commands[1][-1] == "--jobs=7,8,9"
    commands.clear()
    assert slurm.query_states(["12"]) == {"12": "RUNNING"}
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--local --qos debug", "--qos cannot be used with --local, only when submitting to Slurm; remove it"),
        ("--timeout 5", "--timeout cannot be used when submitting to Slurm, only with --local; remove it"),
        (
            "--check_status --dry_run",
            "--dry_run cannot be used with --check_status, only when submitting to Slurm or with --local or with --cancel",
        ),
        ("--gpus_per_node 0", "--gpus_per_node 0 should be greater than 0"),
        ("--env_setup nothing", "--env_setup nothing is not a file; give the path of a shell script"),
    ],
)
def test_invalid_options_are_rejected(options: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse_arguments(["--inp_dir", "sweep", *options.split()])


@pytest.mark.processes
def test_a_folder_that_cannot_be_claimed_is_one_sentence(make_job: Callable[..., Job]) -> None:
    job = make_job("a")
    (job.folder / ".lock").mkdir()
    output = run_program(job.folder, environment=dict(os.environ), code=1)
    assert f"error: {job.folder / '.lock'}: Is a directory; the jobs' folders must be writable" in output


@pytest.mark.processes
def test_invalid_configs_are_all_reported_and_nothing_is_submitted(make_job: Callable[..., Job]) -> None:
    jobs = [make_job("good"), make_job("no_sequence", training__seq_length=0), make_job("x", training__lr=1)]
    output = run_program(jobs[0].folder.parent, environment=dict(os.environ), code=1)
    assert "error: 2 problems:\n" in output
    assert f"  - {jobs[1].config_file}: training.seq_length=0: it should be greater than 0\n" in output
    assert f"  - {jobs[2].config_file}: unknown key training.lr" in output
    assert [job.status for job in jobs] == ["init"] * 3
    environment = {**os.environ, "PATH": "/nowhere"}
    output = run_program(jobs[0].folder, environment=environment, code=1)
    assert "sbatch is not installed; use a machine with Slurm, or --local" in output
    assert jobs[0].status == "init"


@pytest.mark.slow
def test_requeued_job_resumes_from_its_checkpoint(cluster: dict[str, str], make_job: Callable[..., Job]) -> None:
    """Slurm requeues a job if its node is lost or it is preempted: it is pending again, and keeps its id."""
    job = make_job("job", training__total_train_steps=40, checkpoint__save_frequency=1)
    run_program(job.folder, environment=cluster)
    wait_for(lambda: checkpoint_folders(job.run_folder), job)
    job_id = (job.folder / "slurm_job_id.txt").read_text().strip()
    subprocess.run(["scontrol", "requeue", job_id], env=cluster, check=True)
    wait_for(lambda: "pending        1" in run_program(job.folder, "--check_status", environment=cluster), job)
    wait_for(lambda: job.status == "completed", job)
    assert show_job(job_id, cluster)["Restarts"] == "1"
    assert RESUMED in log_of(job)
    assert len(metrics(job.run_folder)) == 40
