"""Where the time of a pipeline step goes, in picotron and in the same schedule of torch.distributed.pipelining.

python -m benchmarks.schedule_profile looped_bfs dualpipev
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.pipelining import PipelineStage

from benchmarks.schedules import PP, TORCH_CLASSES, torch_step
from benchmarks.side_by_side import Variant, machine, measure, print_markdown
from benchmarks.workload import picotron_step, require_gpus
from picotron.optimizer import AdamW
from picotron.pipeline_parallel import executor
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel

TIMED: dict[str, list[tuple[Any, str, str]]] = {
    "torch": [
        (PipelineStage, "forward_one_chunk", "forward"),
        (PipelineStage, "backward_one_chunk", "backward"),
        (PipelineStage, "backward_weight_one_chunk", "backward"),
        (torch.optim.AdamW, "step", "AdamW"),
    ],
    "picotron": [
        (PipelineParallel, "forward", "forward"),
        (PipelineParallel, "backward", "backward"),
        (executor, "run_deferred", "backward"),
        (AdamW, "step", "AdamW"),
    ],
}
COLUMNS = ["forward", "backward", "AdamW", "rest", "step", "kernel", "page faults"]


def timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return `function` with the time of its calls added to `seconds[name]`."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **keywords)
        seconds[name] += time.perf_counter() - start
        return result

    return call


def profiled_step(rank: int, trainer: str, engine: str, micro_batches: int, folder: str) -> Callable[[], None]:
    """Return a training step that appends its profile to the file `{trainer}{rank}`, one JSON object per step."""
    seconds: dict[str, float] = defaultdict(float)
    for owner, method, name in TIMED[trainer]:
        mock.patch.object(owner, method, timed(getattr(owner, method), name, seconds)).start()
    if trainer == "torch":
        step = torch_step(rank, engine, micro_batches)
    else:
        step = picotron_step(rank, {"pp_size": PP, "pp_engine": engine}, gradient_accumulation_steps=micro_batches)

    def profiled() -> None:
        seconds.clear()
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        step()
        after, total = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
        found = {**seconds, "rest": total - sum(seconds.values()), "step": total}
        found["kernel"] = after.ru_stime - before.ru_stime
        found["page faults"] = after.ru_minflt - before.ru_minflt
        with Path(folder, f"{trainer}{rank}").open("a") as file:
            file.write(json.dumps(found) + "\n")

    return profiled


def profile(engine: str, micro_batches: int, turns: int) -> list[list[str]]:
    """Return the rows of a schedule: the mean of each column over the turns, for each rank and trainer."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        variants = [Variant(name, profiled_step, (name, engine, micro_batches, folder), PP) for name in TIMED]
        (theirs, memory), (ours, our_memory) = measure(variants, turns, 1).values()
        ratio = statistics.median(one / other for one, other in zip(theirs, ours, strict=True))
        for rank in range(PP):
            for trainer in TIMED:
                lines = Path(folder, f"{trainer}{rank}").read_text().splitlines()[1:]  # the first step is a warm-up
                means = {key: statistics.mean(json.loads(line)[key] for line in lines) for key in COLUMNS}
                faults = f"{means.pop('page faults') / 1000:,.0f}"
                cells = [f"{value:.2f}" for value in means.values()]
                speed, size = ("", "") if trainer == "torch" else (f"{ratio:.2f}", f"{our_memory / memory:.2f}")
                rows.append([engine, str(rank), trainer, *cells, faults, speed, size])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=TORCH_CLASSES, help="schedules")
    parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches per step; default: 4")
    parser.add_argument("--turns", type=int, default=7, help="number of steps of each trainer; default: 7")
    options = parser.parse_args()
    require_gpus(PP)
    print(f"{options.micro_batches} micro-batches, seconds per step, means of {options.turns} steps. {machine()}")
    header = ["schedule", "rank", "", *COLUMNS[:-2], "of it in the kernel", "page faults, thousands"]
    header += ["relative speed", "relative memory"]
    rows = [row for engine in options.engines for row in profile(engine, options.micro_batches, options.turns)]
    print_markdown([header, *rows])


if __name__ == "__main__":
    main()
