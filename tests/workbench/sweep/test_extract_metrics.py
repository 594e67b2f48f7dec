"""extract_metrics.py: the table and the plots of sweeps, with runs in every state."""

import csv
import json
import math
import tracemalloc
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.support.oracle import config_data
from tests.support.samples import write_jsonl
from workbench.sweep import table as extract_metrics
from workbench.sweep.jobs import Job, find_jobs

PLOTS = ("loss.png", "throughput.png")


def record(step: int, rate: float, loss: float = 5.0, mfu: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 64 * step, "step_time": 64 / rate,
        "tokens_per_second": 2 * rate, "tokens_per_second_per_gpu": rate, "mfu": mfu, "memory_gb": 1.0 + step / 10, **more,
    }  # fmt: skip


def steps(count: int, rate: float = 100.0) -> list[dict[str, Any]]:
    return [record(i, rate) for i in range(1, count + 1)]


def job(folder: Path, records: list[dict[str, Any]] | None, status: str | None = None, tail: str = "") -> Job:
    """Write the files of a job: config.json, and if given, metrics.jsonl (the records and `tail`) and status.txt."""
    new_job = Job(folder, folder.name)
    config = config_data("dp2 tp2 m4", training__micro_batch_size=3, training__total_train_steps=9)
    new_job.run_folder.mkdir(parents=True)
    new_job.config_file.write_text(json.dumps(config))
    if records is not None:
        with open(write_jsonl(new_job.run_folder / "metrics.jsonl", records), "a") as file:
            file.write(tail)
    if status:
        new_job.set_status(status)  # type: ignore[arg-type]
    return new_job


def extract(folder: Path, *words: str) -> dict[str, dict[str, str]]:
    """Run extract_metrics.py. Returns the rows of metrics.csv by name."""
    extract_metrics.main(["--inp_dir", str(folder), *words])
    for plot in PLOTS:
        assert (folder / plot).read_bytes().startswith(b"\x89PNG")
    with (folder / "metrics.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def test_row_of_a_completed_run_summarises_its_steps_after_warm_up(tmp_path: Path) -> None:
    rates = [10.0, 90.0, 50.0, 101.0, 103.0, 99.0, 1000.0]
    records = [record(i + 1, rate, 9 - i, mfu=0.1 + i / 100) for i, rate in enumerate(rates)]
    records[3] |= {"eval_loss": 6.5, "bits_per_byte": 2.5, "memory_gb": 2.5}
    evaluated = {"step": 0, "tokens": 0, "eval_loss": 9.0}  # before the first step
    job(tmp_path / "dp2_tp2", [evaluated, *records], "completed")
    assert extract(tmp_path)["dp2_tp2"] == {
        "name": "dp2_tp2", "status": "completed", "dp": "2", "pp": "1", "cp": "1", "tp": "2", "pp_engine": "1f1b",
        "micro_batch_size": "3", "gradient_accumulation_steps": "4", "global_batch_size": "24", "seq_length": "16",
        "step": "7", "total_train_steps": "9", "final_loss": "3", "eval_loss": "6.5", "bits_per_byte": "2.5",
        "median_tokens_per_second_per_gpu": str(median(rates[3:])),
        "mfu": str(fmean([0.13, 0.14, 0.15, 0.16])), "memory_gb": "2.5", "problem": "",
        "forecast_tokens_per_second_per_gpu": "", "forecast_mfu": "", "forecast_memory_gb": "",
    }  # fmt: skip
    assert extract(tmp_path, "--warmup", "6")["dp2_tp2"]["median_tokens_per_second_per_gpu"] == "1000.0"


def test_measured_and_forecast_numbers_are_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, records, rate in (("measured", steps(5), 110.0), ("waiting", None, 110.0), ("z_faster", None, 220.0)):
        forecast = {"tokens_per_second_per_gpu": rate, "mfu": None, "memory_gb": 0.75, "step_time": 1.0}
        job(tmp_path / name, records).forecast_file.write_text(json.dumps(forecast))
    job(tmp_path / "broken", steps(1)).forecast_file.write_text("{")
    rows = extract(tmp_path)
    assert rows["measured"]["forecast_tokens_per_second_per_gpu"] == "110.0"
    assert rows["measured"]["forecast_mfu"] == ""
    assert "forecast.json is not valid JSON" in rows["broken"]["problem"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["measured", "100", "110", "+10.0%", "1.500", "0.750", "-50.0%"] in lines
    assert ["waiting", "-", "110", "-", "-", "0.750", "-"] in lines
    assert [line[0] for line in lines if line[:1] and line[0] in rows][:3] == ["z_faster", "measured", "waiting"]


STATES = {  # records, status.txt, and what follows the records; then the step, the final loss and the throughput
    "in_progress": (steps(5), "running", '{"step": 6, "lo', ("5", "5.0", "100.0")),
    "begun": (steps(2), "running", "", ("2", "5.0", "")),  # all of it is warm-up, but for the loss
    "failed": ([*steps(5), record(6, 100.0, math.nan)], "fail", "", ("6", "nan", "100.0")),
    "no_metrics": (None, "oom", "", ("", "", "")),
    "empty_metrics": ([], "timeout", "", ("", "", "")),
    "never": (None, None, "", ("", "", "")),
}


def test_runs_in_every_state_have_rows(tmp_path: Path) -> None:
    for name, (records, status, tail, _) in STATES.items():
        job(tmp_path / name, records, status, tail)
    (tmp_path / "never" / "run").rmdir()
    job(tmp_path / "no_config", None, "fail").config_file.write_text('{"training": {"sed": 1}}')
    rows = extract(tmp_path)
    assert rows.pop("no_config")["dp"] == ""
    columns = ("step", "final_loss", "median_tokens_per_second_per_gpu")
    for name, (_, status, _, expected) in STATES.items():
        assert (rows[name]["status"], rows[name]["dp"]) == (status or "init", "2")
        assert tuple(rows[name][column] for column in columns) == expected


def limits_of_losses(folder: Path) -> tuple[float, float]:
    """Return the lowest and the highest loss that the plot of a sweep shows."""
    figure = Figure()
    extract_metrics.draw_losses([extract_metrics.read_run(each) for each in find_jobs(folder)], figure)
    return figure.axes[0].get_ylim()


def test_a_diverged_run_is_named_and_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {
        "0": [7.0, math.nan],
        "a": [7.0, 6.0, 5.0],
        "b": [7.0, 5.0, 4.0],
        "far": [7.0, math.nan, 4e35],
        "first": [math.nan, 5.0],
        "plateau": [7.0, 9.0, 8.0],
    }
    for name, each in losses.items():
        records = [record(i, 10.0, loss, grad_norm=loss) for i, loss in enumerate(each, 1)]
        if name == "a":
            records.insert(0, {"step": 0, "tokens": 0, "eval_loss": 8.0})  # before the first step
        if name == "b":  # of the runs that are compared, it alone has been evaluated
            records[-1] |= {"eval_loss": 9.0}
        job(tmp_path / name, records, "completed")
    job(tmp_path / "c", [record(1, 10.0, 3.9)], "fail")  # it might have become NaN
    rows = extract(tmp_path)
    statuses = ["diverged", "completed", "completed", "fail", "diverged", "diverged", "diverged"]
    assert [row["status"] for row in rows.values()] == statuses
    assert {row["problem"] for row in rows.values()} == {""}
    assert "the lowest final loss is 4.0000, of b\n" in capsys.readouterr().out
    low, high = limits_of_losses(tmp_path)
    assert (3 < low < 4, 7 < high < 8) == (True, True)


def test_a_loss_that_can_be_negative_does_not_diverge_and_is_drawn_as_a_whole(tmp_path: Path) -> None:
    job(tmp_path / "grpo", [record(i, 10.0, loss) for i, loss in enumerate((-0.06, -0.1, -0.01), 1)], "completed")
    assert extract(tmp_path)["grpo"]["status"] == "completed"
    assert limits_of_losses(tmp_path)[1] > -0.01


def test_memory_is_that_of_one_run_and_of_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_metrics, "draw", lambda *_: None)
    peaks = []
    for count in (1, 10):
        for i in range(count):
            job(tmp_path / str(count) / str(i), steps(1000))
        tracemalloc.start()
        extract_metrics.main(["--inp_dir", str(tmp_path / str(count))])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 4 * peaks[0]


def test_a_picture_of_thousands_of_runs_can_be_opened(tmp_path: Path) -> None:
    run = extract_metrics.read_run(job(tmp_path / "one", steps(2)))
    figure = Figure()
    extract_metrics.draw_losses([run] * 5000, figure)
    assert (figure.get_figwidth() < 40, len(figure.axes[0].lines)) == (True, 2 * 5000)


def test_keys_that_the_sweep_varies_are_columns(tmp_path: Path) -> None:
    for rate in ("0.1", "0.01"):
        file = job(tmp_path / f"lr{rate}", steps(1)).config_file
        file.write_text(file.read_text().replace('"learning_rate": 0.01', f'"learning_rate": {rate}'))
    rows = extract(tmp_path)
    assert [rows[f"lr{rate}"]["training.learning_rate"] for rate in ("0.1", "0.01")] == ["0.1", "0.01"]
    assert {key for row in rows.values() for key in row} == {*extract_metrics.COLUMNS, "training.learning_rate"}


def test_archived_runs_are_ignored_and_the_config_of_a_run_is_that_of_its_folder(tmp_path: Path) -> None:
    new_job = job(tmp_path / "again", steps(8), "running")
    (archive := new_job.run_folder / "earlier.1").mkdir()
    write_jsonl(archive / "metrics.jsonl", [record(99, 1.0, 0.0)])
    (archive / "config.json").write_text("{}")
    config = new_job.config_file.read_text()
    (new_job.run_folder / "config.json").write_text(config.replace('"dp_size": 2', '"dp_size": 7'))
    assert [(row["step"], row["dp"]) for row in extract(tmp_path).values()] == [("8", "7")]


def test_runs_started_by_hand_have_rows_without_status_and_folders_of_models_have_none(tmp_path: Path) -> None:
    new_job = job(tmp_path / "sizes" / "quickstart", steps(8))
    (new_job.run_folder / "metrics.jsonl").rename(new_job.folder / "metrics.jsonl")
    (tmp_path / "arch").mkdir()
    (tmp_path / "arch" / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    for folder, name in ((tmp_path, "sizes/quickstart"), (new_job.folder, "quickstart")):
        ((found, row),) = extract(folder).items()
        assert (found, row["status"], row["step"], row["dp"]) == (name, "", "8", "2")
