"""Comparison of two runs: losses and gradient norms of all steps, which must not depend on the layout.

    python -m docs.programs.compare runs/one runs/tp2

It exits with status 1 if the runs have different steps, or a number differs by more than 1e-9 of itself.
"""

import argparse
import json
import math
import sys
from pathlib import Path

KEYS, TOLERANCE = ("loss", "grad_norm"), 1e-9


def read_steps(folder: Path) -> dict[int, list[float]]:
    """Return the loss and the gradient norm of each step in a run's metrics.jsonl."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError as error:
        sys.exit(f"error: cannot read {error.filename}: {error.strerror}; give folders of runs")
    records = map(json.loads, text.splitlines())
    return {record["step"]: [record[key] for key in KEYS] for record in records if KEYS[1] in record}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare losses and gradient norms of two runs, step by step.")
    parser.add_argument("runs", nargs=2, type=Path, help="folders of the runs")
    one, other = map(read_steps, parser.parse_args().runs)
    if not one or one.keys() != other.keys():
        sys.exit(f"error: the runs have different steps: {sorted(one)} and {sorted(other)}")
    found = []
    for step in one:
        for key, a, b in zip(KEYS, one[step], other[step], strict=True):
            difference = 0.0 if a == b else abs(a - b) / abs(a) if a else math.inf
            found.append((math.isnan(difference), difference, f"step {step} on: {key} {a:.9g} and {b:.9g}"))
    print(f"{len(one)} steps, largest relative difference of losses and gradient norms: {max(found)[1]:.0e}")
    for is_nan, difference, where in found:
        if is_nan or difference > TOLERANCE:
            sys.exit(f"DIFFERENT from {where}")


if __name__ == "__main__":
    main()
