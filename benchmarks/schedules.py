"""Pipeline schedules: each compared with the class of torch.distributed.pipelining that has its name, on the same
stages, with the time of each part of the step, and with the step that picotron's simulator predicts.

python -m benchmarks.schedules
"""

import itertools
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

from benchmarks.side_by_side import Variant, check_same_losses, gather, measure, print_markdown
from benchmarks.torch_pipeline import PP, TORCH_CLASSES, config_of, torch_step
from benchmarks.workload import ON_GPU, TINY, arguments, device_of, picotron_step, require_gpus, training_of
from picotron.console import number
from picotron.optimizer.optimizer import AdamW
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from workbench.pipelines import executor
from workbench.pipelines.planning import training_schedule
from workbench.pipelines.recorder import Recorder
from workbench.schedules.simulate import Span, Timeline, measured_costs, simulate

TIMED: dict[str, list[tuple[Any, str, str]]] = {
    "torch": [
        (PipelineStage, "forward_one_chunk", "forward"),
        (PipelineStage, "backward_one_chunk", "backward"),
        (PipelineStage, "backward_weight_one_chunk", "backward"),
        (torch.optim.AdamW, "step", "AdamW"),
    ],
    "picotron": [
        (PipelineParallel, "forward", "forward"),
        (PipelineParallel, "backward", "backward"),  # of the loops
        (executor, "backward", "backward"),
        (executor, "run_deferred", "backward"),
        (AdamW, "step", "AdamW"),
    ],
}
PARTS = ["forward", "backward", "AdamW", "rest", "of the step in the kernel", "page faults, thousands"]
COLUMNS = ["step"] + ([] if ON_GPU else PARTS)  # a GPU computes while Python calls these functions


def timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return `function` with the time of its calls added to `seconds[name]`."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **keywords)
        seconds[name] += time.perf_counter() - start
        return result

    return call


def profiled_step(rank: int, trainer: str, engine: str, micro_batches: int, folder: str) -> Callable[[], Any]:
    """Return a training step that appends its profile to the file `{trainer}{rank}`, one JSON object per step."""
    seconds: dict[str, float] = defaultdict(float)
    for owner, method, name in TIMED[trainer]:
        mock.patch.object(owner, method, timed(getattr(owner, method), name, seconds)).start()
    if trainer == "torch":
        step = torch_step(rank, engine, micro_batches)
    else:
        step = picotron_step(rank, {"pp_size": PP, "pp_engine": engine}, gradient_accumulation_steps=micro_batches)

    def profiled() -> Any:
        seconds.clear()
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        loss = step()
        after, total = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
        found = {**seconds, "rest": total - sum(seconds.values()), "step": total}
        found["of the step in the kernel"] = after.ru_stime - before.ru_stime
        found["page faults, thousands"] = (after.ru_minflt - before.ru_minflt) / 1000
        with Path(folder, f"{trainer}{rank}").open("a") as file:
            file.write(json.dumps(found) + "\n")
        return loss

    return profiled


def profile(engine: str, micro_batches: int, runs: int, steps: int) -> list[list[str]]:
    """Return the rows of a schedule: the mean of each column over all steps, for each rank and trainer.

    Every run has new processes, because the speed of the same program differs by several percent between processes. Its
    first two steps are a warm-up: only then does a process have all the memory that it needs.
    """
    speeds, memories = [], []
    found: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            variants = [Variant(name, profiled_step, (name, engine, micro_batches, folder), PP) for name in TIMED]
            results = measure(variants, 2, steps)
            check_same_losses(results)
            theirs, ours = results.values()
            speeds.append(theirs.seconds[-1] / ours.seconds[-1])
            memories.append(ours.memory / theirs.memory)
            for trainer, rank in itertools.product(TIMED, range(PP)):
                lines = Path(folder, f"{trainer}{rank}").read_text().splitlines()[2 * steps :]  # without the warm-up
                found[trainer, rank] += [json.loads(line) for line in lines]
    ratios = [f"{statistics.median(speeds):.2f}", " ".join(f"{speed:.2f}" for speed in speeds)]
    ratios.append(f"{statistics.median(memories):.2f}")
    rows = []
    for rank, trainer in itertools.product(range(PP), TIMED):
        means = [statistics.mean(step[column] for step in found[trainer, rank]) for column in COLUMNS]
        last = ratios if trainer == "picotron" else [""] * 3
        rows.append([engine, str(rank), trainer, *(f"{value:.2f}" for value in means), *last])
    return rows


def print_profiles(engines: list[str], micro_batches: int, runs: int, steps: int) -> None:
    print(f"\n{micro_batches} micro-batches per step, times in seconds.")
    header = ["schedule", "rank", "", *COLUMNS, "relative speed", "of each run", "relative memory"]
    print_markdown([header] + [row for engine in engines for row in profile(engine, micro_batches, runs, steps)])


def recorded(rank: int, engine: str, micro_batches: int, turns: int) -> list[list[Span]]:
    """Let an executor run training steps without the optimizer, and return the spans of this rank in each of them."""
    config, device = config_of(engine, micro_batches), device_of(rank)
    _, model, loader = training_of(config, device)
    run, steps = executor.Executor(training_schedule(config)), []
    for _ in range(turns + 1):
        recorder = Recorder(device)
        run(model, loader, device, recorder)
        steps.append(recorder.spans)
    return steps[1:]  # the first step is a warm-up


def prediction(engines: list[str], counts: list[int], turns: int) -> None:
    """Compare steps with simulations that use the mean time of each kind of action on each stage in the same step."""
    print("\nA measured step, that with the median ratio, and its simulation from the measured times of its actions.")
    ratio_name = "measured / simulated"
    rows = [["", "micro-batches", "measured, s", "simulated, s", ratio_name, "idle, measured", "idle, simulated"]]
    for engine in engines:
        for micro_batches in counts:
            schedule = training_schedule(config_of(engine, micro_batches))
            pairs = []
            for spans in zip(*gather(recorded, PP, engine, micro_batches, turns), strict=True):
                measured = Timeline(spans)
                pairs.append((measured, simulate(schedule, measured_costs(measured))))
            pairs.sort(key=lambda pair: pair[0].step_time / pair[1].step_time)
            measured, simulated = pairs[len(pairs) // 2]
            times = [measured.step_time, simulated.step_time]
            row = [engine, str(micro_batches), *(f"{seconds:.2f}" for seconds in times), f"{times[0] / times[1]:.3f}"]
            rows.append([*row, f"{measured.bubble:.1%}", f"{simulated.bubble:.1%}"])
    print_markdown(rows)
    largest = max(abs(float(row[4]) - 1) for row in rows[1:])
    print(f"\nSo the simulated step time differs from the measured one by at most {largest:.1%}.")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--engines", nargs="+", choices=TORCH_CLASSES, default=list(TORCH_CLASSES), help="schedules; default: all"
    )
    parser.add_argument(
        "--micro_batches",
        type=number(int, 1),
        nargs="+",
        default=[4],
        help="micro-batches per step; default: 4",
    )
    runs = 1 if TINY else 3
    parser.add_argument(
        "--runs", type=number(int, 1), default=runs, help=f"runs of each profile, with new processes; default: {runs}"
    )
    options = parser.parse_args()
    require_gpus(PP)
    prediction(options.engines, options.micro_batches, options.turns)
    for micro_batches in options.micro_batches:
        print_profiles(options.engines, micro_batches, options.runs, options.steps)


if __name__ == "__main__":
    main()
