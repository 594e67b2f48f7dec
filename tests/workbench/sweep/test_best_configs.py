"""create_config.py --hardware and --best: forecasts in the table and in the jobs, and the fastest layouts that fit."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import create_config
from tests.workbench.sweep.test_create_config import configs, create, error_message
from workbench.explain.hardware import HARDWARE
from workbench.sweep.jobs import find_jobs

EIGHT = ("--world_size", 8, "--global_batch_size", 16, "--hardware", "H100")


def forecasts(folder: Path) -> dict[str, dict[str, Any]]:
    return {job.name: json.loads(job.forecast_file.read_text()) for job in find_jobs(folder)}


def test_best_writes_the_fastest_layouts_with_their_forecasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = create(tmp_path, *EIGHT, "--best", 3, "--mbs", 1, "--distributed.dp_engine", "bucket")
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line.split()[:1] and line.split()[0] in configs(folder)]
    assert [row[0] for row in rows] == list(dict.fromkeys(row[0] for row in rows))
    expected = [forecasts(folder)[row[0]]["step_time"] for row in rows]
    assert expected == sorted(expected)
    layouts = set()
    for data in configs(folder).values():
        layout = data["distributed"]
        sizes = [layout[f"{axis}_size"] for axis in ("dp", "pp", "cp", "tp")]
        assert math.prod(sizes) == 8
        layouts.add((*sizes, layout["pp_engine"]))
        assert not layout["use_cpu"]
        assert layout["sequence_parallel"] == (layout["tp_size"] > 1)
        assert data["training"]["gradient_accumulation_steps"] * layout["dp_size"] == 16
    assert len(layouts) == len(expected) == 3
    every = create(tmp_path, *EIGHT, "--mbs", 1, "--use_cpu", "false", exp_name="every")  # without recomputation
    assert min(each["step_time"] for each in forecasts(every).values()) >= expected[0]


def test_best_without_hardware_measures_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"this": dataclasses.replace(HARDWARE["H100"], name="my processor", cores=2)}
    monkeypatch.setattr(create_config, "find_hardware", lambda name, config: measured[name])
    folder = create(tmp_path, "--world_size", 2, "--global_batch_size", 8, "--best", 2)
    assert "on my processor" in capsys.readouterr().out
    assert [data["distributed"]["use_cpu"] for data in configs(folder).values()] == [True, True]


def test_a_gpu_means_bfloat16_and_no_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template is for CPUs, in float32; a config or a flag of the user's can say otherwise."""
    words = ["--world_size", 8, "--global_batch_size", 32, "--seq_len", 2048, "--model_name", "docs/llama-3.1-8b"]
    words += ["--hardware", "H100", "--tp", 1, 2, "--pp", 1, "--cp", 1, "--mbs", 1, "--distributed.dp_engine", "zero3"]

    def plan(name: str, *more: str) -> tuple[list[float], str]:
        arguments = ["--out_dir", str(tmp_path), "--exp_name", name, "--best", "2", *words, *more]
        create_config.main(list(map(str, arguments)))
        times = [each["step_time"] for each in forecasts(tmp_path / name).values()]
        assert all(config["distributed"]["use_cpu"] is False for config in configs(tmp_path / name).values())
        return sorted(times), capsys.readouterr().out

    times, output = plan("default")
    assert "Forecast in bfloat16 on NVIDIA H100 80GB HBM3:" in output
    own, output = plan("own", "--config", "template/base_config.json")
    assert "Forecast in float32 on NVIDIA" in output
    assert own[0] > 5 * times[0]
    same, _ = plan("same", "--config", "template/base_config.json", "--model.dtype", "bfloat16", "--use_cpu", "false")
    assert same == times


def test_forecast_of_a_job_has_what_metrics_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hardware", "A100", "--tp", 1, 2, "--dtype", "bfloat16", "--use_cpu", "false")
    folder = create(tmp_path, *("--model.dtype" if word == "--dtype" else word for word in words))
    for name, found in forecasts(folder).items():
        ranks = int(name.removeprefix("tp"))
        assert found["step_time"] == pytest.approx(sum(found["seconds"].values()))
        assert found["tokens_per_second_per_gpu"] * found["step_time"] * ranks == pytest.approx(64)
        assert 0 < found["mfu"] < 1
        assert 0 < found["memory_gb"] < 1
    assert "MFU" in capsys.readouterr().out
    assert not list(create(tmp_path, "--tp", 1, 2, exp_name="none").glob("*/forecast.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hardware", "H100", "--best", 3), "--world_size and --global_batch_size"),
        ((*EIGHT[:3], 7, *EIGHT[4:], "--best", 3, "--dp", 8), "no layout of 8 ranks can train"),
        ((*EIGHT, "--best", 3, "--gib", 0.001), "no layout of 8 ranks fits"),
    ],
    ids=str,
)
def test_impossible_searches_are_rejected(tmp_path: Path, words: tuple[Any, ...], message: str) -> None:
    assert message in error_message(tmp_path, *words)
