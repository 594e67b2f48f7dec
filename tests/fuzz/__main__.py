"""Look for a case in which picotron computes something else than transformers on one process.

    make fuzz      or: python -m tests.fuzz --minutes 10 --seed 7

draws a model, a layout, data and events, trains in processes that are kept, and compares losses, gradient norms, first
gradients and final weights in float64. A case that differs is simplified, and printed as a command that repeats it.
"""

import argparse
import collections
import json
import os
import re
import sys
import time

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ["TQDM_DISABLE"] = "1"

import torch

from conformance.worker_pool import WorkerPool
from tests.fuzz.cases import draw_case
from tests.fuzz.check import check, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Compare random cases with transformers.")
    parser.add_argument("--minutes", type=float, default=5.0, help="time after which no case begins [5]")
    parser.add_argument("--cases", type=int, default=10**9, help="number of cases [no limit]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases [0]")
    parser.add_argument("--first", type=int, default=0, help="number of the first case [0]")
    parser.add_argument("--case", help="run only this case, in JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool = WorkerPool()
    try:
        if options.case:
            result = check(pool, json.loads(options.case))
            print(*result)
            return int(result.outcome == "different")
        return run_cases(pool, options)
    finally:
        pool.close()


def run_cases(pool: WorkerPool, options: argparse.Namespace) -> int:
    end, number = time.monotonic() + 60 * options.minutes, options.first
    outcomes: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    worst = 0.0
    while time.monotonic() < end and number < options.first + options.cases:
        case = draw_case(options.seed, number)
        result = check(pool, case)
        outcomes[result.outcome] += 1
        worst = max(worst, result.error if result.outcome == "equal" else 0.0)
        if result.outcome == "refused":
            refusals[re.sub(r"\d+", "_", result.text)[:110]] += 1
        if result.outcome == "different":
            print(f"case {number} of seed {options.seed} differs: {result.text}", flush=True)
            case = shrink(pool, case)
            print(
                f"  simplified: {check(pool, case).text}\n  python -m tests.fuzz --case '{json.dumps(case)}'",
                flush=True,
            )
        number += 1
        if (number - options.first) % 100 == 0:
            print(f"{number - options.first} cases: {dict(outcomes)}, largest error {worst:.1e}", flush=True)
    print(f"{sum(outcomes.values())} cases of seed {options.seed}: {dict(outcomes)}, largest error {worst:.1e}")
    for sentence, count in refusals.most_common():
        print(f"  refused {count}: {sentence}")
    return int(outcomes["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
