"""Training steps under torch's profiler: the kernels that take the GPU's time, its idle time, and synchronisations."""

import functools
import gzip
import json
import re
import statistics
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.report import Content, Options, Outcome, Part, header, row, seconds_of, synchronize
from benchmarks.gpu.speed import Step, free_memory, picotron, workloads

# The first group of which a word occurs in a kernel's name counts.
GROUPS = {
    "fused (torch.compile)": "^triton_",  # whatever the names of its operations
    "communication": "nccl",
    "attention": "flash|fmha|attention|sdpa|cudnn",
    "matrix products": "gemm|nvjet|cutlass|cublas|xmma|splitk|::mm|addmm|matmul",
    "optimizer and clipping": "multi_tensor|adam|foreach",
    "gradient accumulation": "CUDAFunctor_add<float>.*LoadWithCast",  # float32 += bfloat16
    "norms": "norm|GammaBeta",
    "embedding": "embedding|index",
    "softmax of the loss": "exp|log|softmax|scatter|gather|max",
    "copies and conversions": "copy|memcpy|memset|fill|cat|zero",
    "element-wise": "elementwise|vectorized|mul|add|sub|div|silu|sin|cos",
    "sums": "reduce|sum",
}
TOP = 15
DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
SYNCHRONISES = "synchronizing CUDA operation"  # of the warning that torch's debug mode gives


def group_of(kernel: str) -> str:
    return next((group for group, words in GROUPS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def short(kernel: str) -> str:
    """Shorten a kernel's name for a table: without return type, namespaces and what Markdown would interpret."""
    name = re.sub(r"^void |\b(at::native|cutlass|std|c10|at|cuda|detail)::|\(anonymous namespace\)::", "", kernel)
    name = re.sub(r"[^\w:<>, ()-]", "", name)
    return name if len(name) <= 110 else name[:107] + "..."


def device_events(trace: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Return the work on the device: kernels and copies, or on a CPU the operators, which can contain others."""
    kinds = DEVICE_EVENTS if device.type == "cuda" else {"cpu_op"}
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in kinds]
    if not found:
        raise RuntimeError(f"the profiler recorded no event of the kinds {sorted(kinds)}")
    return sorted(found, key=lambda event: float(event["ts"]))


def busy_and_span(events: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the time in which any event runs, and that from the first event's start to the last one's end."""
    busy, start, end = 0.0, float(events[0]["ts"]), float(events[0]["ts"])
    first = start
    for event in events:  # sorted by start
        begin, finish = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if begin > end:
            busy, start = busy + end - start, begin
        end = max(end, finish)
    return busy + end - start, end - first


def record(step: Step, device: torch.device, folder: Path, name: str) -> Path:
    """Profile a step and return the path of its trace, for chrome://tracing or ui.perfetto.dev."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    synchronize(device)
    with profile(activities=activities) as profiler:
        step()
        synchronize(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


def synchronisations(step: Step, device: torch.device) -> Counter[str]:
    """Run a step, and count by line of code the operations for which the CPU waited for the GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    root = str(Path.cwd()) + "/"
    waits = [each for each in caught if SYNCHRONISES in str(each.message)]
    return Counter(f"{each.filename.removeprefix(root)}:{each.lineno}" for each in waits)


def traced(name: str, options: Options, **training: Any) -> Outcome:
    """Profile a step, and return its tables."""
    device, workload = options.device, workloads(options)[0]
    free_memory(device)
    step = picotron(workload, **training)
    seconds = statistics.median(seconds_of(step, device, warm_up=3, repeats=3))
    waits = synchronisations(step, device)
    with tempfile.TemporaryDirectory() as folder:
        path = record(step, device, options.trace or Path(folder), name)
        with gzip.open(path, "rt") as file:
            events = device_events(json.load(file), device)
    del step
    free_memory(device)
    busy, span = busy_and_span(events)

    lines = [
        "",
        f"### {name.capitalize()}",
        "",
        f"Without the profiler, a step of {workload.name} takes {1e3 * seconds:,.1f} ms. With it, {span / 1e3:,.1f} ms pass from the first kernel to",
        f"the last, and in {busy / 1e3:,.1f} ms of these, a kernel runs. So the GPU is idle for {max(0.0, 1 - busy / 1e6 / seconds):.1%} of a step, or {1 - busy / span:.1%} with",
        "the profiler, which slows down the CPU.",
    ]
    total = sum(float(event["dur"]) for event in events)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        for key in (event["name"], f"group {group_of(event['name'])}"):
            times[key] += float(event["dur"])
            counts[key] += 1

    def cells(key: str) -> list[str]:
        return [f"{times[key] / 1e3:,.1f}", f"{times[key] / total:.1%}", f"{counts[key]:,}"]

    ranked = [key for key, _ in times.most_common()]
    groups, kernels = ([key for key in ranked if key.startswith("group ") == grouped] for grouped in (True, False))
    lines += header("kernels", "ms", "share of the GPU's time", "launches")
    lines += [row([key.removeprefix("group "), *cells(key)]) for key in groups]
    lines += ["", f"The {TOP} kernels that take the most time:"]
    lines += header("kernel", "kind", "ms", "share of the GPU's time", "launches")
    lines += [row([f"`{short(key)}`", group_of(key), *cells(key)]) for key in kernels[:TOP]]
    lines += [
        "",
        f"The CPU waited for the GPU {sum(waits.values())} times in another step, as far as torch's debug mode notices:",
    ]
    lines += header("line", "times")
    lines += [row([line, count]) for line, count in waits.most_common() or [("none", 0)]]
    return Outcome(lines)


def trace_section(options: Options) -> Content:
    """Return the section of the report."""
    steps = ({"compiled": {"compile": True}} if options.compiled else {}) | {"eager": {"compile": False}}
    return [
        "One step with picotron, as in the section on speed, with micro-batches of 4 sequences.",
        *(Part([name], functools.partial(traced, name, options, **training), 60) for name, training in steps.items()),
    ]
