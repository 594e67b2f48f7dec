"""The program extract_metrics.py: the results of a sweep as a table and two plots."""

import argparse
import csv
import io
import logging
import math
import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from picotron.config import Config
from picotron.console import UserError
from workbench.console import number, print_line, text_table
from workbench.files import read_object, write_atomically
from workbench.run.config_reader import parse_config
from workbench.run.run_folder import LARGEST, Record, parse_load_path, read_records
from workbench.sweep.combinations import canonical_json
from workbench.sweep.jobs import Job, find_jobs

logger = logging.getLogger("picotron")

Rows = Sequence[dict[str, Any]]  # of a table, or records of steps, by column
RATE = "tokens_per_second_per_gpu"
COLUMNS = (
    "name", "status", "dp", "pp", "cp", "tp", "pp_engine", "micro_batch_size", "gradient_accumulation_steps",
    "global_batch_size", "seq_length", "step", "total_train_steps", "final_loss", "eval_loss", "bits_per_byte",
    f"median_{RATE}", f"forecast_{RATE}", "mfu", "forecast_mfu", "memory_gb", "forecast_memory_gb", "problem",
)  # fmt: skip
FAILED = ("fail", "oom")
DIVERGED = 1.1  # times the first loss, above which a run has diverged if it ends there
# Keys that differ without a choice of the sweep, or have a column of another name.
OWN_KEYS = """
    checkpoint.save_dir checkpoint.load_path logging.run_name distributed.dp_size distributed.pp_size
    distributed.cp_size distributed.tp_size distributed.pp_engine training.micro_batch_size
    training.gradient_accumulation_steps training.seq_length training.total_train_steps
"""
STYLES = ("-", "--", "-.", ":")
MOST_BARS = 60
MOST_NAMES = 300  # beside the curves; with more, the picture would be too wide to be opened


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Args:
        name: the name of its job.
        status: the status of its job, or "" if the run was started by hand; "diverged" if it has completed with a loss
            of more than DIVERGED times the first one.
        config: the config, or None if it is invalid.
        records: the records of metrics.jsonl.
        problem: the first problem of the run's files, or "".
        forecast: what `create_config.py --hardware` expected, or {}.
    """

    name: str
    status: str
    config: Config | None
    records: list[Record]
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
        _, start = parse_load_path(self.config)
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
    if status in ("completed", "") and losses and not losses[-1] <= ceiling(losses):
        status = "diverged"
    return Run(job.name, status, config, records, problem or damage, forecast)


def ceiling(losses: Sequence[float]) -> float:
    """Return the loss above which a run has diverged if it ends there; infinity for losses that can be negative, as
    those of GRPO.
    """
    return math.inf if min(losses) <= 0 else DIVERGED * losses[0]


def varied_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the keys of the config in which runs differ, with their value in each run; None without a valid config."""
    dumps = [run.config.model_dump() if run.config else {} for run in runs]
    flat = [
        {f"{section}.{key}": value for section, keys in each.items() for key, value in keys.items()} for each in dumps
    ]
    known = dict.fromkeys(key for each in flat for key in each)
    values = {key: [each.get(key) for each in flat] for key in known}
    return {key: each for key, each in values.items() if len({str(each[i]) for i, run in enumerate(flat) if run}) > 1}


def field_values(records: Rows, field: str) -> list[float]:
    """Return the values of a field. Records without a value are skipped: there is no MFU on a CPU, and not every step
    has an evaluation.
    """
    return [record[field] for record in records if record.get(field) is not None]


def table_row(run: Run, warmup: int) -> dict[str, Any]:
    """Return a run's row of metrics.csv, without the columns that have no value.

    Args:
        warmup: number of first steps that throughput and MFU exclude.
    """
    trained = [record for record in run.records if record["step"] > 0]
    timed = trained[warmup:]
    row: dict[str, Any] = {"name": run.name, "status": run.status} | ({"problem": run.problem} if run.problem else {})
    if run.config is not None:
        layout, training = run.config.distributed, run.config.training
        row |= {axis: getattr(layout, f"{axis}_size") for axis in ("dp", "pp", "cp", "tp")}
        row |= {"pp_engine": layout.pp_engine, "global_batch_size": run.config.global_batch_size}
        for key in ("micro_batch_size", "gradient_accumulation_steps", "seq_length", "total_train_steps"):
            row[key] = getattr(training, key)
    for column, field, records, summary in (
        ("step", "step", run.records, max),
        ("final_loss", "loss", run.records, operator.itemgetter(-1)),
        ("eval_loss", "eval_loss", trained, operator.itemgetter(-1)),
        ("bits_per_byte", "bits_per_byte", trained, operator.itemgetter(-1)),
        (f"median_{RATE}", RATE, timed, median),
        ("mfu", "mfu", timed, fmean),
        ("memory_gb", "memory_gb", run.records, max),
    ):
        if values := field_values(records, field):
            row[column] = summary(values)
    return row | {f"forecast_{field}": value for field, value in run.forecast.items()}


def comparison(rows: Rows) -> str:
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


def best(rows: Rows) -> str:
    """Return a sentence about the run with the lowest loss, of its last evaluation, or of its last step if fewer than
    two have one, among those that have ended well, or were started by hand; "" if there are fewer than two.
    """
    rows = [row for row in rows if row["status"] in ("completed", "")]
    for column in ("eval_loss", "final_loss"):
        found = sorted((row[column], row["name"]) for row in rows if math.isfinite(row.get(column, math.nan)))
        if len(found) > 1:
            loss, name = found[0]
            return f"the lowest {column.replace('_', ' ')} is {loss:.4f}, of {name}"
    return ""


def write_table(rows: Rows, varied: Sequence[str], path: Path) -> None:
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

    Runs that compute the same in several layouts have coinciding curves: lines of one colour, each narrower than the
    one below.
    """
    axes = figure.add_subplot(axisbelow=True)
    axes.grid(alpha=0.3)
    groups = defaultdict(list)
    for run in filter(lambda run: run.records, runs):
        groups[run.computation].append(run)
    for j, group in enumerate(groups.values()):
        for i, run in enumerate(group):
            colour, above = f"C{j % 10}", len(group) - 1 - i
            style, width = STYLES[(i + j // 10) % len(STYLES)], 1.2 + min(2.5, 5 / len(group)) * above
            look = {"color": colour, "alpha": 0.5 if above else 1, "linewidth": width}
            name = escape_dollars(run.label)
            # matplotlib leaves out names that are empty or begin with _
            axes.plot(*points(run, "loss"), style, label=f" {name}", **look)
            axes.plot(*points(run, "eval_loss"), "o", color=colour, markersize=5, markeredgecolor="black")
    drawn = [losses for run in runs if (losses := [each for each in run.losses if math.isfinite(each)])]
    if drawn and axes.get_ylim()[1] > (highest := max(map(ceiling, drawn))):
        lowest = min(map(min, drawn))
        axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)  # a diverged run would flatten all others
    axes.set(xlabel="step\nline: training; dot: evaluation", ylabel="loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    named = len(runs) <= MOST_NAMES
    columns = 1 + len(runs) // 30 * named
    figure.set_figwidth(5.5 + 2.5 * columns)
    if groups and named:  # matplotlib warns of a legend without names
        figure.legend(loc="outside right upper", fontsize=7, ncols=columns)


def points(run: Run, field: str) -> tuple[list[float], list[float]]:
    """Return the steps of a run that have a value of a field, and these values."""
    records = [record for record in run.records if record.get(field) is not None]
    return field_values(records, "step"), field_values(records, field)


def draw_throughput(rows: Rows, figure: Any) -> None:
    """Plot the throughput and the memory of each run, fastest on top."""
    rate = f"median_{RATE}"
    timed = sorted((row for row in rows if rate in row), key=lambda row: row[rate])
    shown = timed[-MOST_BARS:]
    figure.set_figheight(1.5 + 0.25 * len(shown))
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for axes, column in ((speed, rate), (memory, "memory_gb")):
        axes.barh(range(len(shown)), [row.get(column, 0) for row in shown], color="lightsteelblue")
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    names = [f"{escape_dollars(row['name'])}  {row[rate]:,.0f}" for row in shown]
    speed.set_yticks(range(len(shown)), names, fontsize=8)
    hidden = f", the fastest {len(shown)} of {len(timed)}" * (len(shown) < len(timed))
    speed.set_xlabel(f"tokens/s per device, median of steps{hidden}")
    memory.set_xlabel("peak memory in GB,\non the rank that needs most")


def draw(runs: Sequence[Run], rows: Rows, folder: Path) -> None:
    """Write the two plots."""
    from matplotlib.figure import Figure

    for name, plot in (
        ("loss", lambda figure: draw_losses(runs, figure)),
        ("throughput", lambda figure: draw_throughput(rows, figure)),
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
        runs, rows = [], []
        for job in find_jobs(options.inp_dir):
            run = read_run(job)
            rows.append(table_row(run, options.warmup))
            # The fields that are not drawn would take most of the memory.
            drawn = [{key: each.get(key) for key in ("step", "loss", "eval_loss")} for each in run.records]
            runs.append(replace(run, records=drawn))
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
