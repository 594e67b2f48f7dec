"""The program extract_metrics.py: the results of a sweep as a table and two plots."""

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
from picotron.console import UserError
from workbench.console import number, print_line, text_table
from workbench.files import read_object, write_atomically
from workbench.run.config_reader import parse_config
from workbench.run.run_folder import LARGEST, parse_load_path, read_records
from workbench.sweep.combinations import FLAGS, canonical_json, folder_names
from workbench.sweep.jobs import Job, find_jobs

logger = logging.getLogger("picotron")

RATE = "tokens_per_second_per_gpu"
COLUMNS = (
    "name", "status", "dp", "pp", "cp", "tp", "pp_engine", "micro_batch_size", "gradient_accumulation_steps",
    "global_batch_size", "seq_length", "step", "total_train_steps", "final_loss", "eval_loss", "bits_per_byte",
    f"mean_{RATE}", f"median_{RATE}", f"forecast_{RATE}", "mfu", "forecast_mfu", "memory_gb", "forecast_memory_gb", "problem",
)  # fmt: skip
FAILED = ("fail", "oom")
DIVERGED = 1.1  # times the first loss, above which a run has diverged if it ends there
# Keys that differ without a choice of the sweep, or have a column of another name.
OWN_KEYS = """
    checkpoint.save_dir checkpoint.load_path logging.run_name distributed.dp_size distributed.pp_size
    distributed.cp_size distributed.tp_size distributed.pp_engine training.micro_batch_size
    training.gradient_accumulation_steps training.seq_length training.total_train_steps
"""
# How the keys begin that can change the speed of a step.
SPEED_KEYS = (
    "distributed.", "schedule.", "model.", "environment.", "training.seq_length", "training.micro_batch_size",
    "training.gradient_accumulation_steps", "training.activation_checkpointing", "training.optimizer_states", "training.compile",
)  # fmt: skip

STYLES = [line + marker for marker in ("", "^", "*", "+", ">", "<") for line in ("-", "--", "-.", ":")]
DIRECT = 8  # the most curves that are labelled at their ends; with more, there is a legend
MOST_BARS = 60


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Args:
        name: the name of its job.
        status: the status of its job, or "" if the run was started by hand; "diverged" if it has completed with a loss
            of more than DIVERGED times the first one.
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
        return self.name + f" ({self.status})" * (self.status in (*FAILED, "diverged"))

    @property
    def losses(self) -> list[float]:
        return field_values(self.records, "loss")

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
    status: str = "" if by_hand else job.status
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
    losses = field_values(records, "loss")
    if status in ("completed", "") and losses and losses[-1] > DIVERGED * losses[0]:
        status = "diverged"
    return Run(name, status, config, records, problem or damage or error_in_log(job, status), forecast)


def error_in_log(job: Job, status: str) -> str:
    """Return the last error in the newest log of a failed job, without the rank that printed it, or ""."""
    logs = sorted(job.folder.glob("log_*"), key=lambda log: log.stat().st_mtime) if status in FAILED else []
    text = logs[-1].read_text(errors="replace") if logs else ""
    errors = re.findall(r"^(?:\[rank \d+\] error: |(?=\w*(?:Error|Exception): ))(.+)", text, re.MULTILINE)
    return str(errors[-1]) if errors else ""


def varied_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the keys of the config in which runs differ, with their value in each run; None without a valid config."""
    dumps = [run.config.model_dump() if run.config else {} for run in runs]
    flat = [
        {f"{section}.{key}": value for section, keys in each.items() for key, value in keys.items()} for each in dumps
    ]
    known = dict.fromkeys(key for each in flat for key in each)
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
    timed = [record for record in run.records if record["step"] > 0][warmup:]
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


def best(rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about the run with the lowest loss, of its last evaluation or step; "" if there is one run."""
    column = "eval_loss" if any("eval_loss" in row for row in rows) else "final_loss"
    found = {row["name"]: row[column] for row in rows if math.isfinite(row.get(column, math.nan))}
    if len(found) < 2:
        return ""
    name = min(found, key=lambda name: found[name])
    return f"the lowest {column.replace('_', ' ')} is {found[name]:.4f}, of {name}"


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


def draw_losses(runs: Sequence[Run], figure: Any) -> None:
    """Plot the losses of each run against its steps.

    Runs that compute the same in several layouts have coinciding curves: lines of one colour (of several, if there are
    no other runs), each narrower than the one below.
    """
    from matplotlib.colors import to_rgb

    axes = figure.add_subplot(axisbelow=True)
    axes.grid(alpha=0.3)
    same = defaultdict(list)
    for run in filter(lambda run: run.records, runs):
        same[run.computation].append(run)
    groups = list(same.values())
    palette = [f"C{i % 10}" for i in range(len(runs))]
    for j, group in enumerate(groups):
        for i, run in enumerate(group):
            colour, above = palette[j if len(groups) > 1 else i], len(group) - 1 - i
            tint = [1 - (0.4 if above else 1) * (1 - part) for part in to_rgb(colour)]  # lighter below other lines
            style = STYLES[(i + j // 10 * len(group)) % len(STYLES)]
            trained = [record for record in run.records if "loss" in record]
            steps, losses = field_values(trained, "step"), field_values(trained, "loss")
            axes.plot(
                steps, losses, style, color=tint, linewidth=1.2 + min(2.5, 5 / len(group)) * above, markevery=0.1,
                markersize=5, label=escape_dollars(run.label),
            )  # fmt: skip
            if run.status in FAILED:  # a run of one step has no line
                axes.plot(steps[-1:], losses[-1:], "x", color=colour, markersize=8, markeredgewidth=2)
            evaluated = [record for record in run.records if record.get("eval_loss") is not None]
            steps, losses = field_values(evaluated, "step"), field_values(evaluated, "eval_loss")
            axes.plot(steps, losses, "o", color=colour, markersize=5, markeredgecolor="black")
    drawn = [losses for run in runs if (losses := [each for each in run.losses if math.isfinite(each)])]
    if drawn and axes.get_ylim()[1] > (ceiling := DIVERGED * max(losses[0] for losses in drawn)):
        lowest = min(map(min, drawn))
        axes.set_ylim(lowest - 0.05 * (ceiling - lowest), ceiling)  # a diverged run would flatten all others
    marks = ["dot: evaluation"] * any("eval_loss" in record for run in runs for record in run.records)
    marks += ["cross: the run failed"] * any(run.records and run.status in FAILED for run in runs)
    axes.set(xlabel="\n".join(["step", *["; ".join(["line: training", *marks])] * bool(marks)]), ylabel="loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if 1 < len(groups) <= DIRECT and len(runs) <= 3 * DIRECT:
        label_curves(groups, palette, axes)
    elif groups:
        columns = 1 + len(runs) // 30
        figure.set_figwidth(5.5 + 2.5 * columns)
        figure.legend(loc="outside right upper", fontsize=7, ncols=columns)


def label_curves(groups: Sequence[Sequence[Run]], palette: Sequence[Any], axes: Any) -> None:
    """Write the names of the runs of each curve beside its end, from bottom to top, without overlaps."""
    low, high = axes.get_ylim()
    ends = []
    for group, colour in zip(groups, palette, strict=False):
        if losses := [loss for loss in group[0].losses if math.isfinite(loss)]:
            styles = [f"{STYLES[i % len(STYLES)]} " if len(group) > 1 else "" for i in range(len(group))]
            names = "\n".join(style + escape_dollars(run.label) for style, run in zip(styles, group, strict=True))
            ends.append((min(1.0, (losses[-1] - low) / (high - low)), names, colour, len(group)))
    free = 0.0  # as a fraction of the height
    for place, names, colour, lines in sorted(ends, key=lambda end: end[0]):
        height = 0.034 * lines
        middle = max(place, free + height / 2)
        free = middle + height / 2 + 0.01
        axes.text(1.01, middle, names, color=colour, fontsize=7, va="center", transform=axes.transAxes)


def settings(runs: Sequence[Run]) -> list[str]:
    """Name each run after the keys that vary and can change its speed, as `create_config.py` names folders."""
    varied = {key: values for key, values in varied_keys(runs).items() if key.startswith(SPEED_KEYS)}
    if len({run.config.global_batch_size for run in runs if run.config}) == 1:  # it follows from dp and mbs
        varied.pop(FLAGS["grad_acc_steps"], None)
    keys = [key for key in dict.fromkeys([*FLAGS.values(), *varied]) if key in varied]
    combinations = [{key: varied[key][i] for key in keys} for i in range(len(runs))]
    distinct = {canonical_json(each): each for each in combinations}
    names = dict(zip(distinct, folder_names(list(distinct.values())), strict=True))
    return [names[canonical_json(each)] or ("all runs" if len(runs) > 1 else runs[0].name) for each in combinations]


def draw_throughput(runs: Sequence[Run], rows: Sequence[dict[str, Any]], figure: Any) -> None:
    """Plot the throughput and the memory of each of the `settings`, fastest on top, with a dot for each run."""
    groups = defaultdict(list)
    for run, name, row in zip(runs, settings(runs), rows, strict=True):
        if run.config is not None and f"median_{RATE}" in row:
            groups[name].append(row)
    rates = {name: fmean(row[f"median_{RATE}"] for row in group) for name, group in groups.items()}
    names = sorted(rates, key=lambda name: rates[name])[-MOST_BARS:]
    figure.set_figheight(1.5 + 0.25 * len(names))
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    speed.barh(range(len(names)), [rates[name] for name in names], color="lightsteelblue")
    speed.set_yticks(range(len(names)), [f"{name}  {rates[name]:,.0f}" for name in names], fontsize=8)
    hidden = f", the fastest {len(names)} of {len(rates)}" * (len(names) < len(rates))
    speed.set_xlabel(f"tokens/s per device, median of steps\nbar: mean of the runs (dots){hidden}")
    memory.set_xlabel("peak memory in GB,\non the rank that needs most")
    for axes, column in ((speed, f"median_{RATE}"), (memory, "memory_gb")):
        points = [(row[column], i) for i, name in enumerate(names) for row in groups[name] if column in row]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color="black", markersize=3)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)


def draw(runs: Sequence[Run], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the two plots."""
    from matplotlib.figure import Figure

    for name, plot in (
        ("loss", lambda figure: draw_losses(runs, figure)),
        ("throughput", lambda figure: draw_throughput(runs, rows, figure)),
    ):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot(figure)
        figure.axes[0].set_title(escape_dollars(folder.resolve().name))
        image = io.BytesIO()
        figure.savefig(image, dpi=150)
        write_atomically(folder / f"{name}.png", image.getvalue())


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        varied = {key: values for key, values in varied_keys(runs).items() if key not in OWN_KEYS.split()}
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
    if sentence := best(rows):
        print_line(sentence)
    print_line(
        f"{len(runs)} run{'s' * (len(runs) > 1)} ({statuses}): metrics.csv, loss.png and throughput.png in {options.inp_dir}"
    )
