"""Run train.py on this machine's GPU, and measure its speed and memory:

    make gpu        or: python -m benchmarks.gpu [--only PART ...]

The commands run one after the other, those that matter most first. A command that fails, or takes longer than its
limit, does not end the others. On a machine without a GPU, --tiny tries the program with tiny models on the CPU.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.one_gpu import LAYOUTS, difference, losses
from benchmarks.side_by_side import DifferentResults, gather, machine, peak_memory_mib, print_markdown
from benchmarks.workload import ON_GPU, TINY, add_tiny, model_config, picotron_step, run_config
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.memory import rank_memory

PARTS = ("programs", "numbers", "kernels", "shared", "speed", "trace", "memory", "layouts")
TRACE = Path("runs/gpu/trace.json.gz")
COMPILES = (True, False) if ON_GPU else (False,)
Command = tuple[str, list[str], float]  # name, arguments of Python, limit in seconds


def commands(part: str, folder: str) -> Iterator[Command]:
    """Yield the commands of a part.

    Args:
        folder: folder for a run of train.py.
    """
    if part == "programs":
        train = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "train.py"]
        train += ["--config", "docs/small.json", "--checkpoint.save_dir", folder, "--model.dtype", "bfloat16"]
        train += ["--distributed.use_cpu", str(not ON_GPU).lower(), "--training.total_train_steps"]
        yield "train.py, 20 steps", [*train, "20"], 90
        yield "train.py, resumed for 5 steps", [*train, "25", "--checkpoint.load_path", "latest"], 60
        yield "generate.py", ["generate.py", "--checkpoint", folder, "--prompt", "def f(x):"], 60
    elif part == "kernels":
        yield part, ["-m", "benchmarks.cp_kernels", *["--tiny"] * TINY], 60
    elif part == "shared":  # of one GPU by several ranks; the layouts with most axes first
        narrow = ["--dtype", "bfloat16", *["--compile"] * ON_GPU]
        most = LAYOUTS[:2]
        for name, *options in (*([name] for name in (most if TINY else LAYOUTS)), *([name, *narrow] for name in most)):
            yield " ".join([name, *options]), ["-m", "benchmarks.one_gpu", name, *options], 90
    elif part == "layouts":  # two processes, so two GPUs
        for name in ("dp", "zero1", "zero3", "tp", "cp"):
            yield name, ["-m", "benchmarks.training", name, *["--tiny"] * TINY], 240
    elif part == "speed":
        yield "speed beside transformers", ["-m", "benchmarks.training", "one", *["--tiny"] * TINY], 300
    else:
        limit = {"numbers": 150, "trace": 150, "memory": 400}[part]
        yield part, ["-m", "benchmarks.gpu", "--run", part, *["--tiny"] * TINY], limit


def run(name: str, arguments: list[str], limit: float) -> bool:
    """Run a command, print its output, and return whether it succeeded."""
    print(f"\n## {name}\n", flush=True)
    start = time.monotonic()
    try:
        done = subprocess.run([sys.executable, *arguments], timeout=limit, check=False)
        problem = f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"not done after {limit:.0f} s"
    print(f"\n{name}: {problem or 'ok'} ({time.monotonic() - start:.0f} s)", flush=True)
    return not problem


def numbers() -> None:
    """Train on the GPU and on the CPU, and print the largest relative difference. In float64, it is that of the rotary
    tables, which both compute in float32.

    Raises:
        DifferentResults: the runs differ by more than rounding.
    """
    rows, limits = [["dtype", "largest difference of losses and gradient norms"]], {"float64": 1e-7, "float32": 1e-4}
    for dtype, limit in limits.items():
        with tempfile.TemporaryDirectory() as folder:
            places = enumerate((not ON_GPU, True))
            worst = difference(*(losses({"use_cpu": cpu}, Path(folder, str(i)), dtype, False) for i, cpu in places))
        rows.append([dtype, f"{worst:.1e}"])
        if worst > limit:
            raise DifferentResults(f"{dtype}: the losses or gradient norms differ by {worst:.1e}")
    print_markdown(rows)


def waits_of(step: Callable[[], Any]) -> list[str]:
    """Run a step, and return the lines of code that made the CPU wait for the GPU, as far as torch notices."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = step()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
    float(loss)  # waits, so that the GPU is idle when the next step is timed
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


def trace(rank: int) -> None:
    """Profile a step: idle time of the GPU, the kernels that take the most time, and the lines that wait."""
    step = picotron_step(rank, {}, compile=ON_GPU)
    for _ in range(3):
        float(step())
    waits = waits_of(step)
    start = time.perf_counter()
    for _ in range(5):
        loss = step()
    float(loss)
    seconds = (time.perf_counter() - start) / 5
    kind = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU
    with profile(activities={ProfilerActivity.CPU, kind}) as profiler:
        float(step())
    TRACE.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(TRACE))
    averages = profiler.key_averages()
    column = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    kernels = [each for each in averages if not ON_GPU or each.device_type == DeviceType.CUDA]
    busy = sum(getattr(each, column) for each in kernels if not each.is_user_annotation) / 1e6
    print(averages.table(sort_by=column, row_limit=20, max_name_column_width=80))
    print(
        f"A step takes {1e3 * seconds:,.1f} ms, of which kernels run for {busy / seconds:.0%}. {TRACE} has the trace."
    )
    print(f"The CPU waited for the GPU {len(waits)} times:", *waits)


def recomputation(rank: int, kind: str, compiled: bool) -> list[str]:
    """Train with a kind of recomputation. Returns its peak memory, the estimate and the milliseconds of a step."""
    training = {"activation_checkpointing": kind, "compile": compiled}
    config, model = run_config({}, **training), model_config()
    estimate = rank_memory(config, model, plan_pipeline(config, model))[0].total
    step = picotron_step(rank, {}, **training)
    for _ in range(2):
        float(step())
    start = time.perf_counter()
    float(step())
    seconds = time.perf_counter() - start
    sizes = [peak_memory_mib() * 2**20, torch.cuda.max_memory_reserved() if ON_GPU else 0, estimate]
    return [*(f"{size / 1e9:.2f}" for size in sizes), f"{1e3 * seconds:,.1f}"]


def memory() -> None:
    rows = [["recomputation", "", "peak, GB", "reserved, GB", "estimate, GB", "ms per step"]]
    for compiled, kind in itertools.product(COMPILES, ("none", "selective", "full")):
        cells = gather(recomputation, 1, kind, compiled)[0]
        rows.append([kind, "compiled" if compiled else "eager", *cells])
    print_markdown(rows)


def main(arguments: list[str]) -> int:
    """Run the commands. Returns 0 if all succeed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run these parts [all that fit the machine]")
    parser.add_argument("--run", choices=("numbers", "trace", "memory"), help=argparse.SUPPRESS)
    add_tiny(parser)
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.tiny:
        print("make gpu needs a GPU, and torch finds none on this machine (ARGS=--tiny tries the program on the CPU).")
        return 1
    if options.run:
        {"numbers": numbers, "trace": lambda: gather(trace, 1), "memory": memory}[options.run]()
        return 0
    print(machine(), flush=True)
    shares = not ON_GPU or torch.cuda.nccl.version() >= (2, 30)
    fits = {"shared": shares, "layouts": torch.cuda.device_count() > 1}
    parts = options.only or [part for part in PARTS if fits.get(part, True)]
    with tempfile.TemporaryDirectory() as folder:
        done = {name: run(name, *rest) for part in parts for name, *rest in commands(part, f"{folder}/run")}
    failed = [name for name, good in done.items() if not good]
    print(f"\n{len(done)} commands, {len(failed)} failed", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
