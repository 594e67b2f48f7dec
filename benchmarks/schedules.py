"""Pipeline schedules: each compared with the class of torch.distributed.pipelining that has its name, on the same
stages, and with the step that picotron's simulator predicts.

python -m benchmarks.schedules
"""

import statistics
from functools import partial

from benchmarks.side_by_side import Variant, check_same_losses, gather, measure, print_markdown
from benchmarks.torch_pipeline import MODEL, PP, TORCH_CLASSES, config_of, torch_step
from benchmarks.workload import TINY, arguments, device_of, picotron_step, require_gpus, training_of
from workbench.console import number
from workbench.pipelines import executor
from workbench.pipelines.planning import training_schedule
from workbench.pipelines.recorder import Recorder
from workbench.schedules.simulate import Span, Timeline, measured_costs, simulate


def compared(engine: str, micro_batches: int, runs: int, steps: int) -> list[str]:
    """Return the row of a schedule.

    Every run has new processes, because the speed of the same program differs by several percent between processes. Its
    first two turns are a warm-up: only then does a process have all the memory that it needs.
    """
    seconds, memories = [], []
    layout = {"pp_size": PP, "pp_engine": engine}
    ours = partial(picotron_step, shape=MODEL, gradient_accumulation_steps=micro_batches)
    for _ in range(runs):
        variants = [Variant("torch", torch_step, (engine, micro_batches), PP), Variant("picotron", ours, (layout,), PP)]
        results = measure(variants, 2, steps)
        check_same_losses(results)
        seconds.append([each.seconds[-1] for each in results.values()])
        memories.append(results["picotron"].memory / results["torch"].memory)
    means = [f"{statistics.mean(each):.2f}" for each in zip(*seconds, strict=True)]
    speeds = [theirs / ours for theirs, ours in seconds]
    ratios = [f"{statistics.median(speeds):.2f}", " ".join(f"{speed:.2f}" for speed in speeds)]
    return [engine, *means, *ratios, f"{statistics.median(memories):.2f}"]


def recorded(rank: int, engine: str, micro_batches: int, turns: int) -> list[list[Span]]:
    """Let an executor run training steps without the optimizer, and return the spans of this rank in each of them."""
    config, device = config_of(engine, micro_batches), device_of(rank)
    _, model, loader = training_of(config, device, MODEL)
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
        "--runs",
        type=number(int, 1),
        default=runs,
        help=f"runs of each comparison, with new processes; default: {runs}",
    )
    options = parser.parse_args()
    require_gpus(PP)
    prediction(options.engines, options.micro_batches, options.turns)
    for micro_batches in options.micro_batches:
        print(f"\n{micro_batches} micro-batches per step")
        rows = [compared(engine, micro_batches, options.runs, options.steps) for engine in options.engines]
        columns = ["torch, s/step", "picotron, s/step", "relative speed", "of each run", "relative memory"]
        print_markdown([["schedule", *columns], *rows])


if __name__ == "__main__":
    main()
