"""A sweep on disk: one folder per job.

    SWEEP/dp2_tp4/config.json   the config of the run, written by create_config.py or by hand
                  forecast.json the speed and memory that create_config.py expects, with --hardware
                  status.txt    one word of STATUSES
                  run/          checkpoint.save_dir of the run: metrics.jsonl, checkpoints, ...
                  log_*         output of the run: log_local.out, or log_123.out for Slurm job 123

Programs that start a job pass `Job.arguments` to train.py. So a sweep can be moved, no two jobs write to the same
folder, and a job that has begun continues from its newest checkpoint.
"""

import importlib.metadata
import logging
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast, get_args

from picotron.config import Config
from picotron.console import UserError
from workbench.files import locked, read_object, write_atomically
from workbench.run.run_folder import parse_load_path

logger = logging.getLogger("picotron")

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
Status = Literal["init", "pending", "running", "completed", "fail", "oom", "timeout", "cancelled", "unknown"]
STATUSES: tuple[Status, ...] = get_args(Status)
ACTIVE = ("pending", "running")
STOPPED = "stopped by SIG[A-Z0-9]+, without an error"
"""regular expression that matches the log of a `cancelled` job, see `exit_after_signal`"""
ENDED = ("completed", "fail", "oom", "timeout", "cancelled")
OUT_OF_MEMORY = "MemoryError|out of memory|can't allocate memory|oom.kill event"
"""regular expression that matches the log of an `oom` job: the messages of CUDA, Python, the CPU allocator and Slurm"""


def read_word(file: Path) -> str:
    """Read a file with one word. Returns "" if there is no such file, or if it cannot be read, with a warning."""
    try:
        return file.read_text(errors="replace").strip()[:100] if file.exists() else ""
    except OSError as error:
        logger.warning("%s cannot be read: %s", file, error.strerror)
        return ""


@dataclass(frozen=True)
class Job:
    """A run of a sweep.

    Args:
        folder: path of the job's folder.
        name: path of the folder relative to the sweep.
    """

    folder: Path
    name: str

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def forecast_file(self) -> Path:
        """The forecast of the run, if `create_config.py` knew the hardware."""
        return self.folder / "forecast.json"

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def arguments(self, config: Config) -> list[str]:
        """Return the arguments of train.py: outputs go to the job's folder, and a run resumes from the job's newest
        checkpoint. If there is none, it starts as its config says.
        """
        _, start = parse_load_path(config)
        load_path = f"latest or {start}" if start else "latest"
        overrides = ["--checkpoint.save_dir", str(self.run_folder), "--checkpoint.load_path", load_path]
        return ["--config", str(self.config_file), *overrides]

    @property
    def status(self) -> Status:
        """The word in status.txt; "init" if there is no such file, "unknown" if it cannot be read or has no status."""
        file = self.folder / "status.txt"
        word = read_word(file) or ("unknown" if file.exists() else "init")
        if word not in STATUSES:
            logger.warning("%s contains %r; it should contain one of %s", file, word, ", ".join(STATUSES))
            return "unknown"
        return cast(Status, word)

    def set_status(self, status: Status) -> None:
        """Write status.txt atomically."""
        write_atomically(self.folder / "status.txt", status + "\n")

    def claim(self) -> AbstractContextManager[IO[str] | None]:
        """Claim the job, so that no other process submits or runs it, see `locked`."""
        return locked(self.folder / ".lock")


def stop_options(grace: int) -> list[str]:
    """Options of torchrun that pass stop signals on to a run, and give it `grace` seconds to write a checkpoint.

    torch 2.11 has no --shutdown-timeout: its torchrun always waits for 30 seconds.
    """
    version = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    timeout = ["--shutdown-timeout", str(grace)] if version >= (2, 12) else []
    return ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *timeout]


def find_jobs(folder: Path) -> list[Job]:
    """Find the jobs in or below a folder, sorted by name. Folders inside a job (runs, checkpoints) are not searched.
    A folder of a model is not a job.

    Raises:
        UserError: there is no job.
    """
    jobs = []
    for path, subfolders, files in os.walk(folder):
        if "config.json" in files and not is_model(Path(path)):
            subfolders.clear()
            name = os.path.relpath(path, folder)
            jobs.append(Job(Path(path), Path(path).resolve().name if name == "." else name))
    if not jobs:
        command = f"create_config.py --out_dir {folder.resolve().parent} --exp_name {folder.resolve().name}"
        raise UserError(f"no config of a run in or below {folder}; write some with {command}")
    return sorted(jobs, key=lambda job: job.name)


def is_model(folder: Path) -> bool:
    """Return whether the config.json of a folder is that of a Hugging Face model."""
    try:
        return "model_type" in read_object(folder / "config.json")
    except UserError:  # a damaged config is that of a job
        return False
