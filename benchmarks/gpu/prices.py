"""Prices of the steps that the section on speed measures, from benchmarks/roofline.py.

    python -m benchmarks.gpu.prices      writes benchmarks/gpu/prices.json

Pricing needs no GPU, but g++ and a torch whose fake tensors know all operations. A machine with a GPU may have neither,
so the file brings the prices along.
"""

import json
import sys

from benchmarks import roofline
from benchmarks.gpu.fake_cuda import obstacle, restart_with_fake_cuda
from benchmarks.gpu.report import Options
from benchmarks.gpu.speed import PRICES, Workload, micro_batches, workloads
from workbench.explain.hardware import HARDWARE, Hardware


def price(workload: Workload, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of a step, eager and compiled."""
    operations = roofline.record(workload.config(), workload.model, hardware)
    times = {"eager": roofline.eager(operations), "compiled": roofline.compiled(operations, hardware)}
    return {name: round(sum(each.values()), 6) for name, each in times.items()}


def main() -> None:
    if problem := obstacle():
        sys.exit(f"error: {problem}")
    restart_with_fake_cuda()
    options, hardware = Options(), HARDWARE["H200"]
    prices = {each.name: {} for each in workloads(options)}
    for workload in micro_batches(options):
        prices[workload.name][str(workload.rows)] = price(workload, hardware)
        print(workload.name, workload.rows, prices[workload.name][str(workload.rows)], flush=True)
    PRICES.write_text(json.dumps({hardware.name: prices}, indent=2) + "\n")


if __name__ == "__main__":
    main()
