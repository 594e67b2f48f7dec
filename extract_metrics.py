"""Collect the results of a sweep:

    python extract_metrics.py --inp_dir sweeps/sizes

writes metrics.csv, with a row for each run and a column for each key of the config in which the runs differ, and the
plots loss.png, throughput.png and memory.png to that folder. Runs may be in progress, failed or not started; columns
without a value are then empty.

Throughput and MFU exclude the first steps of a run (--warmup), which also allocate memory, fill caches and compile.
"""

import argparse
import csv
import io
import logging
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from picotron.config import Config
from picotron.console import UserError, number, print_line, text_table
from picotron.files import read_object, write_atomically
from picotron.run.config_reader import parse_config
from picotron.run.run_folder import LARGEST, parse_load_path, read_records
from workbench.sweep.combinations import canonical_json
from workbench.sweep.jobs import Job, find_jobs

logger = logging.getLogger("picotron")

RATE = "tokens_per_second_per_gpu"
COLUMNS = (
    "name", "status", "dp", "pp", "cp", "tp", "pp_engine", "micro_batch_size", "gradient_accumulation_steps",
    "global_batch_size", "seq_length", "step", "total_train_steps", "final_loss", "eval_loss", "bits_per_byte",
    f"mean_{RATE}", f"median_{RATE}", f"forecast_{RATE}", "mfu", "forecast_mfu", "memory_gb", "forecast_memory_gb", "problem",
)  # fmt: skip
FAILED = ("fail", "oom")
# Keys that differ without a choice of the sweep, or have a column of another name.
OWN_KEYS = """
    checkpoint.save_dir checkpoint.load_path logging.run_name distributed.dp_size distributed.pp_size
    distributed.cp_size distributed.tp_size distributed.pp_engine training.micro_batch_size
    training.gradient_accumulation_steps training.seq_length training.total_train_steps
"""

STYLES = ("-", "--", "-.", ":")
DIRECT = 8  # the most curves that are labelled at their ends; with more, there is a legend


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Args:
        name: the name of its job.
        status: the status of its job, or "" if the run was started by hand.
        config: the config, or None if it is invalid.
        records: the records of metrics.jsonl.
        problem: the first problem of the run's files, or the error in the log of a failed run, or "".
        forecast: what `create_config.py --hardware` expected, or {}.
    """

    name: str
    status: str
    config: Config | None
    records: list[dict[str, Any]]
    problem: str
    forecast: dict[str, Any]

    @property
    def label(self) -> str:
        return self.name + f" ({self.status})" * (self.status in FAILED)

    @property
    def layout(self) -> str:
        if self.config is None:
            return "?"
        d = self.config.distributed
        return f"dp{d.dp_size} pp{d.pp_size} cp{d.cp_size} tp{d.tp_size}"

    @property
    def computation(self) -> str:
        """What the losses depend on, whatever the layout: the model, the training and the data."""
        if self.config is None:
            return "?"
        data = self.config.model_dump(include={"model", "training", "dataset"})
        for key in ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "compile"):
            del data["training"][key]
        _, start = parse_load_path(self.config.checkpoint.load_path)
        return canonical_json(data | {"global_batch_size": self.config.global_batch_size, "start": start})


def read_run(job: Job) -> Run:
    """Read the run of a job, or a run that was started by hand, with its outputs in the same folder as its config."""
    by_hand = (job.folder / "metrics.jsonl").exists()
    folder = job.folder if by_hand else job.run_folder
    run_config = folder / "config.json"  # written by train.py, including its overrides
    try:
        config, problem = parse_config(read_object(run_config if run_config.exists() else job.config_file)), ""
    except UserError as error:
        config, problem = None, "; ".join(error.problems)
    status = "" if by_hand else job.status
    if status == "unknown":
        problem = problem or "status.txt has no status"
    records, damage = read_records(folder / "metrics.jsonl")
    name = job.folder.resolve().name if job.name == "." else job.name
    try:
        found = read_object(job.forecast_file) if job.forecast_file.exists() else {}
        forecast = {
            field: found[field]
            for field in (RATE, "mfu", "memory_gb")
            if field in found and type(found[field]) in (int, float) and abs(found[field]) <= LARGEST
        }
    except UserError as error:
        forecast, problem = {}, problem or str(error)
    if problem or damage:
        logger.warning("%s: %s", job.folder, problem or damage)
    return Run(name, status, config, records, problem or damage or error_in_log(job, status), forecast)


def error_in_log(job: Job, status: str) -> str:
    """Return the last error in the newest log of a failed job, without the rank that printed it, or ""."""
    logs = sorted(job.folder.glob("log_*"), key=lambda log: log.stat().st_mtime) if status in FAILED else []
    text = logs[-1].read_text(errors="replace") if logs else ""
    errors = re.findall(r"^(?:\[rank \d+\] error: |(?=\w*(?:Error|Exception): ))(.+)", text, re.MULTILINE)
    return str(errors[-1]) if errors else ""


def varied_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the keys of the config in which runs differ, with their value in each run; None without a valid config."""
    dumps = [run.config.model_dump(exclude={"environment"}) if run.config else {} for run in runs]
    flat = [
        {f"{section}.{key}": value for section, keys in each.items() for key, value in keys.items()} for each in dumps
    ]
    known = dict.fromkeys(key for each in flat for key in each if key not in OWN_KEYS.split())
    values = {key: [each.get(key) for each in flat] for key in known}
    return {key: each for key, each in values.items() if len({str(each[i]) for i, run in enumerate(flat) if run}) > 1}


def field_values(records: Sequence[dict[str, Any]], field: str) -> list[float]:
    """Return the values of a field. Records without a value are skipped: there is no MFU on a CPU, and not every step
    has an evaluation.
    """
    return [record[field] for record in records if record.get(field) is not None]


def table_row(run: Run, warmup: int) -> dict[str, Any]:
    """Return a run's row of metrics.csv, without the columns that have no value.

    Args:
        warmup: number of first steps that throughput and MFU exclude.
    """
    timed = run.records[warmup:]
    row: dict[str, Any] = {"name": run.name, "status": run.status} | ({"problem": run.problem} if run.problem else {})
    if run.config is not None:
        layout, training = run.config.distributed, run.config.training
        row |= {axis: getattr(layout, f"{axis}_size") for axis in ("dp", "pp", "cp", "tp")}
        row |= {"pp_engine": layout.pp_engine, "global_batch_size": run.config.global_batch_size}
        for key in ("micro_batch_size", "gradient_accumulation_steps", "seq_length", "total_train_steps"):
            row[key] = getattr(training, key)
    for column, field, records, summary in (
        ("step", "step", run.records, max),
        ("final_loss", "loss", run.records, last),
        ("eval_loss", "eval_loss", run.records, last),
        ("bits_per_byte", "bits_per_byte", run.records, last),
        (f"mean_{RATE}", RATE, timed, fmean),
        (f"median_{RATE}", RATE, timed, median),
        ("mfu", "mfu", timed, fmean),
        ("memory_gb", "memory_gb", run.records, max),
    ):
        if values := field_values(records, field):
            row[column] = summary(values)
    return row | {f"forecast_{field}": value for field, value in run.forecast.items()}


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """Format the measured and the forecast throughput and memory of each run, side by side; fastest forecast first."""
    columns = (f"median_{RATE}", f"forecast_{RATE}", "memory_gb", "forecast_memory_gb")
    lines = [["", "tokens/s per device", "forecast", "error", "GB", "forecast", "error"]]
    for row in sorted(rows, key=lambda row: -row[columns[1]]):
        cells = [row["name"]]
        for measured, expected, digits in ((*columns[:2], 0), (*columns[2:], 3)):
            cells += [f"{row[name]:,.{digits}f}" if name in row else "-" for name in (measured, expected)]
            cells.append(f"{row[expected] / row[measured] - 1:+.1%}" if row.get(measured) else "-")
        lines.append(cells)
    return text_table(lines, first_number=1)


def last(values: Sequence[float]) -> float:
    """Return the last value."""
    return values[-1]


def write_table(rows: Sequence[dict[str, Any]], varied: Sequence[str], path: Path) -> None:
    """Write metrics.csv, with columns of further keys in front of the last one."""
    table = io.StringIO()
    writer = csv.DictWriter(table, (*COLUMNS[:-1], *varied, COLUMNS[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, table.getvalue().encode(errors="surrogateescape"))


def escape_dollars(name: str) -> str:
    """Escape a name for matplotlib, which typesets text between two dollar signs as a formula."""
    return name.encode(errors="replace").decode().replace("$", r"\$")


def colours(count: int) -> list[Any]:
    """Return colours that can be told apart."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["turbo"](0.05 + 0.9 * i / (count - 1)) for i in range(count)]  # its ends are nearly black


def draw_losses(runs: Sequence[Run], axes: Any) -> None:
    """Plot the losses of each run against its steps.

    Runs that compute the same in several layouts have coinciding curves: lines of one colour (of several, if there are
    no other runs), each narrower than the one below.
    """
    same = defaultdict(list)
    for run in filter(lambda run: run.records, runs):
        same[run.computation].append(run)
    groups = list(same.values())
    palette = colours(len(groups) if len(groups) > 1 else len(runs))
    for j, group in enumerate(groups):
        for i, run in enumerate(group):
            colour, above = palette[j if len(groups) > 1 else i], len(group) - 1 - i
            tint = [1 - (0.4 if above else 1) * (1 - part) for part in colour[:3]]  # lighter below other lines
            steps, losses = field_values(run.records, "step"), field_values(run.records, "loss")
            axes.plot(
                steps, losses, STYLES[i % len(STYLES)], color=tint, linewidth=1.2 + min(2.5, 5 / len(group)) * above,
                label=escape_dollars(run.label),
            )  # fmt: skip
            if run.status in FAILED:  # a run of one step has no line
                axes.plot(steps[-1:], losses[-1:], "x", color=colour, markersize=8, markeredgewidth=2)
            evaluated = [record for record in run.records if record.get("eval_loss") is not None]
            steps, losses = field_values(evaluated, "step"), field_values(evaluated, "eval_loss")
            axes.plot(steps, losses, "o", color=colour, markersize=5, markeredgecolor="black")
    marks = ["dot: evaluation"] * any("eval_loss" in record for run in runs for record in run.records)
    marks += ["cross: the run failed"] * any(run.records and run.status in FAILED for run in runs)
    axes.set(xlabel="\n".join(["step", *["; ".join(["line: training", *marks])] * bool(marks)]), ylabel="loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if 1 < len(groups) <= DIRECT and len(runs) <= 3 * DIRECT:
        label_curves(groups, palette, axes)


def label_curves(groups: Sequence[Sequence[Run]], palette: Sequence[Any], axes: Any) -> None:
    """Write the names of the runs of each curve beside its end, from bottom to top, without overlaps."""
    low, high = axes.get_ylim()
    ends = []
    for group, colour in zip(groups, palette, strict=True):
        if losses := [loss for loss in field_values(group[0].records, "loss") if math.isfinite(loss)]:
            styles = [f"{STYLES[i % len(STYLES)]} " if len(group) > 1 else "" for i in range(len(group))]
            names = "\n".join(style + escape_dollars(run.label) for style, run in zip(styles, group, strict=True))
            ends.append(((losses[-1] - low) / (high - low), names, colour, len(group)))
    free = 0.0  # as a fraction of the height
    for place, names, colour, lines in sorted(ends, key=lambda end: end[0]):
        height = 0.034 * lines
        middle = max(place, free + height / 2)
        free = middle + height / 2 + 0.01
        axes.text(1.01, middle, names, color=colour, fontsize=7, va="center", transform=axes.transAxes)


def draw_throughput(runs: Sequence[Run], rows: Sequence[dict[str, Any]], axes: Any) -> None:
    """Plot the throughput of each run as a dot, and that of the fastest run of each layout as a bar, best on top."""
    rates = defaultdict(list)
    for run, row in zip(runs, rows, strict=True):
        if f"median_{RATE}" in row:
            rates[run.layout].append(row[f"median_{RATE}"])
    layouts = sorted(rates, key=lambda layout: max(rates[layout]))
    axes.set(xlabel="tokens/s per device, median of steps\ndot: a run; bar: the fastest run of a layout")
    axes.barh(layouts, [max(rates[layout]) for layout in layouts], color="lightsteelblue")
    for layout in layouts:
        axes.plot(rates[layout], [layout] * len(rates[layout]), "o", color="black", markersize=3)


def draw_memory(runs: Sequence[Run], rows: Sequence[dict[str, Any]], axes: Any) -> None:
    """Plot throughput against peak memory: a point for each run, a colour for each layout."""
    points_of_layout = defaultdict(list)
    for run, row in zip(runs, rows, strict=True):
        if f"median_{RATE}" in row and "memory_gb" in row:
            points_of_layout[run.layout].append((row["memory_gb"], row[f"median_{RATE}"]))
    axes.set(xlabel="peak memory per device in GB, on the rank that needs most", ylabel="tokens/s per device")
    for (layout, points), colour in zip(sorted(points_of_layout.items()), colours(len(points_of_layout)), strict=True):
        axes.plot(*zip(*points, strict=True), "o", label=layout, color=colour)
    if points_of_layout:
        axes.set_xlim(0, 1.05 * max(memory for points in points_of_layout.values() for memory, _ in points))


def draw(runs: Sequence[Run], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the three plots."""
    from matplotlib.figure import Figure

    layouts = len({run.layout for run in runs})
    for name, height, plot in (
        ("loss", 4.5, lambda axes: draw_losses(runs, axes)),
        ("throughput", 1.2 + 0.3 * layouts, lambda axes: draw_throughput(runs, rows, axes)),
        ("memory", 4.5, lambda axes: draw_memory(runs, rows, axes)),
    ):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.add_subplot(title=escape_dollars(folder.resolve().name), axisbelow=True)
        axes.grid(alpha=0.3)
        plot(axes)
        labels = axes.get_legend_handles_labels()[1]
        if labels and not axes.texts:  # labels beside the curves need no legend
            figure.legend(loc="outside right upper", fontsize=7, ncols=1 + len(labels) // 30)
        image = io.BytesIO()
        figure.savefig(image, dpi=150)
        write_atomically(folder / f"{name}.png", image.getvalue())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inp_dir", required=True, type=Path, help="a sweep, a job, or a folder with several sweeps")
    parser.add_argument(
        "--warmup",
        type=number(int, 0),
        default=3,
        help="number of first steps to exclude from throughput [%(default)s]",
    )
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(job) for job in find_jobs(options.inp_dir)]
        rows = [table_row(run, options.warmup) for run in runs]
        varied = varied_keys(runs)
        for i, row in enumerate(rows):
            row |= {key: values[i] for key, values in varied.items() if values[i] is not None}
        write_table(rows, list(varied), options.inp_dir / "metrics.csv")
        draw(runs, rows, options.inp_dir)
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    statuses = ", ".join(f"{count} {status or 'by hand'}" for status, count in Counter(r.status for r in runs).items())
    if forecasts := [row for row in rows if {f"forecast_{RATE}", "forecast_memory_gb"} <= row.keys()]:
        print_line(f"Measured and forecast:\n{comparison(forecasts)}\n")
    print_line(
        f"{len(runs)} runs ({statuses}): metrics.csv, loss.png, throughput.png and memory.png in {options.inp_dir}"
    )


if __name__ == "__main__":
    main()
