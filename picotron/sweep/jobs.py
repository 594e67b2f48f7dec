"""A sweep on disk: one folder per job.

    SWEEP/dp2_tp4/config.json   what to run, written by create_config.py or by hand
                  status.txt    one word of STATUSES
                  run/          checkpoint.save_dir of the run: metrics.jsonl, checkpoints, ...
                  log_*         what the run printed: log_local.out, or log_123.out of Slurm's job 123

Whoever starts a job passes `Job.overrides`, so that a sweep can be moved, and no two jobs write to one folder.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from picotron.errors import UserError

Status = Literal["init", "pending", "running", "completed", "fail", "oom", "timeout", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)
ALIVE = ("pending", "running")
ENDED = STATUSES[3:]
OUT_OF_MEMORY = "MemoryError|out of memory|can't allocate memory|oom.kill event"
"""a regular expression for the log of a job that is `oom`: what CUDA, Python, the CPU's allocator and Slurm say"""


@dataclass(frozen=True)
class Job:
    folder: Path
    name: str
    """the folder's path within the sweep"""

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def overrides(self) -> list[str]:
        """Arguments of train.py: outputs belong to the job, and whoever runs it again goes on where it stopped."""
        return ["--checkpoint.save_dir", str(self.run_folder), "--checkpoint.load_path", "latest"]

    @property
    def status(self) -> Status:
        """What status.txt says; "init" where there is none."""
        file = self.folder / "status.txt"
        word = file.read_text().strip() if file.exists() else "init"
        if word not in STATUSES:
            raise UserError(f"{file} says {word!r}; it should say one of {', '.join(STATUSES)}")
        return cast(Status, word)

    def set_status(self, status: Status) -> None:
        """Write status.txt, as a whole or not at all."""
        temporary = self.folder / f".status.{os.getpid()}"
        temporary.write_text(status + "\n")
        temporary.replace(self.folder / "status.txt")

    @contextlib.contextmanager
    def claim(self) -> Iterator[int | None]:
        """Be the only process that submits or runs the job: the descriptor of a locked file, None if another one is.

        A claim ends with the last process that has the descriptor, even if that is killed.
        """
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield lock.fileno()


def find_jobs(folder: Path) -> list[Job]:
    """The jobs below a folder, or the one it is, by name. What is inside a job (runs, checkpoints) is none.

    Raises:
        UserError: there are none.
    """
    jobs = []
    for path, below, files in os.walk(folder):
        if "config.json" in files:
            below.clear()
            jobs.append(Job(Path(path), os.path.relpath(path, folder)))
    if not jobs:
        raise UserError(f"no config.json in {folder} or below; make some with create_config.py --out_dir {folder}")
    return sorted(jobs, key=lambda job: job.name)
