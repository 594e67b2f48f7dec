"""Comparison of two runs: losses and gradient norms of all steps, which must not depend on the layout.

    python -m docs.programs.compare runs/one runs/tp2

It exits with status 1 if the runs have different steps, or differ by more than the tolerance.
"""

import argparse
import json
import math
import sys
from pathlib import Path

KEYS = ("loss", "grad_norm")


def read_steps(folder: Path) -> dict[int, list[float]]:
    """Return the loss and the gradient norm of each step in a run's metrics.jsonl."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError as error:
        sys.exit(f"error: cannot read {error.filename}: {error.strerror}; give folders of runs")
    records = map(json.loads, text.splitlines())
    return {record["step"]: [record[key] for key in KEYS] for record in records if KEYS[1] in record}


def largest_difference(one: dict[int, list[float]], other: dict[int, list[float]]) -> float:
    """Return the largest difference of two numbers of the same step, relative to the number in `one`, or NaN."""
    if not one or one.keys() != other.keys():
        sys.exit(f"error: the runs have different steps: {sorted(one)} and {sorted(other)}")
    pairs = [pair for step in one for pair in zip(one[step], other[step], strict=True)]
    differences = [0.0 if a == b else abs(a - b) / abs(a) if a else math.inf for a, b in pairs]
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare losses and gradient norms of two runs, step by step.")
    parser.add_argument("runs", nargs=2, type=Path, help="folders of the runs")
    parser.add_argument(
        "--tolerance", type=float, default=1e-9, help="largest relative difference; default: %(default)g"
    )
    options = parser.parse_args()
    one, other = map(read_steps, options.runs)
    difference = largest_difference(one, other)
    print(f"{len(one)} steps, largest relative difference of losses and gradient norms: {difference:.0e}")
    if difference <= options.tolerance:
        return
    for step in one:
        for key, a, b in zip(KEYS, one[step], other[step], strict=True):
            if not abs(a - b) <= options.tolerance * abs(a):  # NaN differs
                sys.exit(f"DIFFERENT from step {step} on: {key} {a:.9g} and {b:.9g}")


if __name__ == "__main__":
    main()
