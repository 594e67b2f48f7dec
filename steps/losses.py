"""Run nine programs, each in a layout, and print their last losses:  python -m steps.losses"""

import math
import subprocess
import sys

RUNS: dict[str, dict[str, int]] = {
    "s1_one_process": {},
    "only_dp": {"dp": 4},
    "only_tp": {"tp": 4},
    "only_pp": {"pp": 4},
    "only_cp": {"cp": 4},
    "s3_sp": {"tp": 4},
    "s6_zero": {"dp": 2, "tp": 2},
    "s8_1f1b": {"dp": 2, "pp": 2},
    "s9_cp": {"dp": 2, "pp": 2, "cp": 2, "tp": 2},
}


def main() -> None:
    print(f"last loss    ranks  {'layout':25}  program")
    for program, sizes in RUNS.items():
        ranks = math.prod(sizes.values())
        options = [f"--{axis}={n}" for axis, n in sizes.items() if not program.startswith("only")]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        command = [*torchrun, "-m", f"steps.{program}", *options]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        layout = " x ".join(f"{axis} {n}" for axis, n in sizes.items()) or "one process"
        print(f"{printed.split()[-1]:11}  {ranks:5}  {layout:25}  {program}", flush=True)


if __name__ == "__main__":
    main()
