"""Solutions to the exercises of docs/sweeps.md, which tests/docs/test_exercises.py checks."""

import csv
import math
from pathlib import Path


def number_of_layouts(processes: int) -> int:
    """Return the number of layouts (dp, pp, cp, tp) with this product. For each prime factor with exponent k, k
    identical factors are distributed over four axes.
    """
    count, prime = 1, 2
    while processes > 1:
        k = 0
        while processes % prime == 0:
            processes, k = processes // prime, k + 1
        count *= math.comb(k + 3, 3)
        prime += 1
    return count


def best_run(table: Path) -> str:
    """Return the name of the completed run with the lowest final loss in a metrics.csv."""
    with table.open(newline="", encoding="utf-8") as file:
        runs = [run for run in csv.DictReader(file) if run["status"] == "completed"]
    return min(runs, key=lambda run: float(run["final_loss"]))["name"]


def waits_for(job: int, chains: int) -> int | None:
    """Return the job that a job (0, 1, 2, ...) waits for, if at most `chains` jobs run at a time. None: it waits for
    no job.
    """
    return job - chains if job >= chains else None
