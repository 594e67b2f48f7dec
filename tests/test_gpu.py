"""make gpu: every section runs on the CPU with tiny models, and failures of sections are reported."""

import math
import os
import time
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.gpu import program
from benchmarks.gpu.program import SECTIONS, Result, Section, run_section
from benchmarks.gpu.report import Check, Content, Options, Outcome, Part
from benchmarks.gpu.training import TWO_RANKS, layout_checks, layout_run
from conformance.grid import LAYOUTS, settings
from conformance.worker_pool import WorkerPool
from workbench.pipelines.engine import check_layout

CPU = Options(on_gpu=False, compiled=False)
ROWS = {"programs": 3, "transformers": 5, "machine": 8, "speed": 8, "rates": 16, "trace": 20, "memory": 3}  # at least


@pytest.mark.parametrize("name", ROWS)
def test_section_runs_on_the_cpu(pool: WorkerPool, name: str) -> None:
    result = Result("here")
    run_section(pool, SECTIONS[name], CPU, math.inf, result, lambda: None)
    assert result.errors == {}
    assert "failed" not in result.text()
    assert sum(line.startswith("| ") for line in result.lines) > ROWS[name]


def test_the_sections_that_run_by_default_fit_into_the_time() -> None:
    assert sum(section.limit for section in SECTIONS.values() if section.first) <= program.SECONDS


# ----------------------------------------------------------------------------------------------------------- failures


def succeeds() -> Outcome:
    return Outcome(["| all is | well |"])


def raises() -> Outcome:
    raise RuntimeError("this kernel | is broken")


def dies() -> Outcome:
    os._exit(1)


def hangs() -> Outcome:
    time.sleep(100)
    return succeeds()


def is_wrong() -> Outcome:
    return Check(["wrong"], lambda: [2.0], 1.0).run()


PARTS = {"raises": raises, "dies": dies, "succeeds": succeeds, "hangs": hangs, "is wrong": is_wrong}


def failing(options: Options) -> Content:
    return ["a table", *(Part(["row", name], each, 0.5 if each is hangs else 60) for name, each in PARTS.items())]


def succeeding(options: Options) -> Content:
    return [Part(["first"], succeeds, 60), Part(["second"], succeeds, 60)]


@pytest.mark.processes
def test_a_failing_row_loses_no_other_row(tmp_path: Path) -> None:
    sections = {"failing": Section("Failing", failing, 60), "succeeding": Section("Succeeding", succeeding, 60)}
    with mock.patch.object(program, "SECTIONS", sections):
        assert program.main(["--cpu", "--out", str(tmp_path / "page.md")]) == 1
    text = (tmp_path / "page.md").read_text()
    for expected in (
        "| Failing | **failed**: 4 |",
        "| Succeeding | ok |",
        "| row | raises | **failed**: RuntimeError: this kernel / is broken |",
        "| row | dies | **failed**: ",
        "| row | hangs | **failed**: ",
        "| wrong | 2.0e+00 | 1 | **failed** |",
    ):
        assert expected in text
    assert text.count("| all is | well |") == 3


# ----------------------------------------------------------------------------------------------------------- the page


# ------------------------------------------------------------------------------------------- what runs on a GPU machine


def test_every_layout_is_valid_on_one_gpu() -> None:
    with mock.patch("torch.cuda.device_count", return_value=1):
        checks = {check.cells[0]: check for check in layout_checks(Options(), {})}
    names = {name.split(",")[0] for name in checks}
    assert {*TWO_RANKS, "dp1 tied kv4 llama"} < names
    shared = [check for name, check in checks.items() if "ranks share a device" in name]
    larger = [name for name in LAYOUTS if 1 < settings(name)[0].distributed.world_size <= 4]
    assert len(shared) == len(larger) + len(TWO_RANKS)
    assert all(check.cells[2] == "gloo" for check in shared)
    for name in names:
        config, model_config = layout_run(name, Options(), {})
        assert check_layout(config, model_config)
        assert not config.distributed.use_cpu
