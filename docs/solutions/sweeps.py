"""Solutions of the exercises of docs/sweeps.md; tests/test_exercises.py checks them."""

import csv
import math
from pathlib import Path


def number_of_layouts(processes: int) -> int:
    """How many (dp, pp, cp, tp) multiply to that. Each prime factor p^k hands its k out to the four axes."""
    count, prime = 1, 2
    while processes > 1:
        k = 0
        while processes % prime == 0:
            processes, k = processes // prime, k + 1
        count *= math.comb(k + 3, 3)
        prime += 1
    return count


def best_run(table: Path) -> str:
    """The name of the completed run with the lowest final loss, in a metrics.csv."""
    with table.open(newline="", encoding="utf-8") as file:
        runs = [run for run in csv.DictReader(file) if run["status"] == "completed"]
    return min(runs, key=lambda run: float(run["final_loss"]))["name"]


def waits_for(job: int, chains: int) -> int | None:
    """The job that job number 0, 1, 2, ... waits for, if at most so many should run at once; None: for none."""
    return job - chains if job >= chains else None
