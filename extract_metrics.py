"""What the runs of a sweep have reached so far:  python extract_metrics.py --inp_dir sweeps/sizes

writes into that folder metrics.csv, with a row for each run, and the pictures loss.png, throughput.png and memory.png.
Runs may be in progress, failed, or not started: what they do not have yet is empty.

Speed and MFU leave out the first steps of a run (--warmup), which wait for memory, caches and compilers.
"""

import argparse
import csv
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from picotron.config import Config
from picotron.config_reader import parse_config, read_json
from picotron.errors import UserError
from picotron.run_folder import read_records
from picotron.sweep.jobs import Job, find_jobs

logger = logging.getLogger("picotron")

RATE = "tokens_per_second_per_gpu"
COLUMNS = (
    "name", "status", "dp", "pp", "cp", "tp", "pp_engine", "micro_batch_size", "gradient_accumulation_steps",
    "global_batch_size", "seq_length", "step", "total_train_steps", "final_loss", "eval_loss", f"mean_{RATE}",
    f"median_{RATE}", "mfu", "memory_gb",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """
    Args:
        config: None if there is no valid one.
        records: the lines of its metrics.jsonl.
    """

    name: str
    status: str
    config: Config | None
    records: list[dict[str, Any]]

    @property
    def layout(self) -> str:
        if self.config is None:
            return "?"
        d = self.config.distributed
        return f"dp{d.dp_size} pp{d.pp_size} cp{d.cp_size} tp{d.tp_size}"


def read_run(job: Job) -> Run:
    """A job's run, or one that train.py was started with by hand, whose outputs are beside its config."""
    by_hand = (job.folder / "metrics.jsonl").exists()
    folder = job.folder if by_hand else job.run_folder
    described = folder / "config.json"  # as it was run
    try:
        config = parse_config(read_json(str(described if described.exists() else job.config_file)))
    except UserError as error:
        logger.warning("%s: %s", job.config_file, error)
        config = None
    name = job.folder.resolve().name if job.name == "." else job.name
    return Run(name, "" if by_hand else job.status, config, read_records(folder / "metrics.jsonl"))


def known(records: Sequence[dict[str, Any]], field: str) -> list[float]:
    """The values of a field, where it has one: there is no MFU on a CPU, and an evaluation not at every step."""
    return [record[field] for record in records if record.get(field) is not None]


def row(run: Run, warmup: int) -> dict[str, Any]:
    """What metrics.csv says of a run; what is not known yet is not there."""
    timed = run.records[warmup:]
    found: dict[str, Any] = {"name": run.name, "status": run.status}
    if run.config is not None:
        layout, training = run.config.distributed, run.config.training
        found |= {axis: getattr(layout, f"{axis}_size") for axis in ("dp", "pp", "cp", "tp")}
        found |= {"pp_engine": layout.pp_engine, "global_batch_size": run.config.global_batch_size}
        for key in ("micro_batch_size", "gradient_accumulation_steps", "seq_length", "total_train_steps"):
            found[key] = getattr(training, key)
    for column, field, records, summary in (
        ("step", "step", run.records, max),
        ("final_loss", "loss", run.records, last),
        ("eval_loss", "eval_loss", run.records, last),
        (f"mean_{RATE}", RATE, timed, fmean),
        (f"median_{RATE}", RATE, timed, median),
        ("mfu", "mfu", timed, fmean),
        ("memory_gb", "memory_gb", run.records, max),
    ):
        if values := known(records, field):
            found[column] = summary(values)
    return found


def last(values: Sequence[float]) -> float:
    return values[-1]


def write_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plain(name: str) -> str:
    """For a picture: matplotlib takes what is between two dollars for a formula."""
    return name.replace("$", r"\$")


def draw_losses(runs: Sequence[Run], axes: Any) -> None:
    axes.set(xlabel="step", ylabel="loss")
    for run in runs:
        if run.records:
            axes.plot(known(run.records, "step"), known(run.records, "loss"), label=plain(run.name), linewidth=1)


def draw_throughput(runs: Sequence[Run], rows: Sequence[dict[str, Any]], axes: Any) -> None:
    """A bar for each layout, the best on top, as long as that of its fastest run; a dot for each run."""
    rates = defaultdict(list)
    for run, each in zip(runs, rows, strict=True):
        if f"median_{RATE}" in each:
            rates[run.layout].append(each[f"median_{RATE}"])
    layouts = sorted(rates, key=lambda layout: max(rates[layout]))
    axes.set(xlabel="tokens/s per device, median of steps")
    axes.barh(layouts, [max(rates[layout]) for layout in layouts], color="lightsteelblue")
    for layout in layouts:
        axes.plot(rates[layout], [layout] * len(rates[layout]), "o", color="black", markersize=3)


def draw_memory(runs: Sequence[Run], rows: Sequence[dict[str, Any]], axes: Any) -> None:
    """A point for each run, a colour for each layout."""
    points = defaultdict(list)
    for run, each in zip(runs, rows, strict=True):
        if f"median_{RATE}" in each:
            points[run.layout].append((each["memory_gb"], each[f"median_{RATE}"]))
    axes.set(xlabel="peak memory per device in GB, of the rank that has most", ylabel="tokens/s per device")
    for layout, found in sorted(points.items()):
        axes.plot(*zip(*found, strict=True), "o", label=layout)


def draw(runs: Sequence[Run], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layouts = len({run.layout for run in runs})
    for name, height, colours, draw_on in (
        ("loss", 4.5, len(runs), lambda axes: draw_losses(runs, axes)),
        ("throughput", 1 + 0.3 * layouts, 1, lambda axes: draw_throughput(runs, rows, axes)),
        ("memory", 4.5, layouts, lambda axes: draw_memory(runs, rows, axes)),
    ):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.add_subplot(title=plain(folder.resolve().name), axisbelow=True)
        axes.set_prop_cycle(color=colormaps["turbo"].resampled(colours)(range(colours)))
        axes.grid(alpha=0.3)
        draw_on(axes)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside right upper", fontsize=7, ncols=1 + len(axes.lines) // 30)
        figure.savefig(folder / f"{name}.png", dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inp_dir", required=True, type=Path, help="a sweep, a job, or a folder that holds some")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not timed [%(default)s]")
    options = parser.parse_args(arguments)
    try:
        if options.warmup < 0:
            raise UserError(f"--warmup {options.warmup} should be a number of steps, 0 or more")
        runs = [read_run(job) for job in find_jobs(options.inp_dir)]
        rows = [row(run, options.warmup) for run in runs]
        write_table(rows, options.inp_dir / "metrics.csv")
        draw(runs, rows, options.inp_dir)
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    statuses = ", ".join(f"{count} {status or 'by hand'}" for status, count in Counter(r.status for r in runs).items())
    print(f"{len(runs)} runs ({statuses}): metrics.csv, loss.png, throughput.png and memory.png in {options.inp_dir}")


if __name__ == "__main__":
    main()
