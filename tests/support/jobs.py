"""Jobs in the tests of sweeps: a name that is hard to quote, and their start."""

from pathlib import Path

from tests.support.program import run

SHELL_SYNTAX = "it's $(touch executed) `touch executed` \"; touch executed; \\ %j & *"
"""a name that creates a file `executed` where a shell command contains it without quotes"""


def submit(folder: Path, *options: str, code: int = 0, **variables: str) -> str:
    """Run `python submit_slurm_jobs.py` and check its exit code. Returns its output."""
    done = run("submit_slurm_jobs.py", "--inp_dir", folder, *options, code=code, **variables)
    return done.stdout + done.stderr
