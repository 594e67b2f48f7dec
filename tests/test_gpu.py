"""make gpu: every section runs on the CPU with tiny models, and failures of sections are reported."""

import math
import os
import time
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from benchmarks.gpu import program
from benchmarks.gpu.kernels import attention_checks
from benchmarks.gpu.program import PAGE, SECTIONS, Result, Section, merged, run_section
from benchmarks.gpu.report import Check, Content, Options, Outcome, Part
from benchmarks.gpu.training import TWO_RANKS, layout_checks, layout_run
from conformance.grid import LAYOUTS, settings
from conformance.worker_pool import WorkerPool
from picotron.context_parallel.block_attention import block_forward
from picotron.parallelize import check_layout

CPU = Options(on_gpu=False, compiled=False)
ROWS = {"transformers": 5, "machine": 8, "speed": 8, "rates": 16, "trace": 20}  # at least


def test_without_a_gpu_the_program_says_so_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = PAGE.read_bytes()
    assert program.main([]) == program.main(["--only", "kernels"]) == 1
    sentence = "make gpu needs a GPU, and torch finds none on this machine (ARGS=--cpu tries the program on the CPU).\n"
    assert capsys.readouterr().out == 2 * sentence
    assert PAGE.read_bytes() == before


@pytest.mark.parametrize("name", ROWS)
def test_section_runs_on_the_cpu(pool: WorkerPool, name: str) -> None:
    result = Result("here")
    run_section(pool, SECTIONS[name], CPU, math.inf, result, lambda: None)
    assert result.errors == {}
    assert "failed" not in result.text()
    assert sum(line.startswith("| ") for line in result.lines) > ROWS[name]


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
def test_a_failing_row_loses_no_other_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {"failing": Section("Failing", failing, 60), "succeeding": Section("Succeeding", succeeding, 60)}
    with mock.patch.object(program, "SECTIONS", sections):
        assert program.main(["--cpu", "--out", str(tmp_path / "page.md")]) == 1
    text = (tmp_path / "page.md").read_text()
    for expected in (
        "| Failing | **failed**: 4 |",
        "| Succeeding | ok |",
        "| row | raises | **failed**: RuntimeError: this kernel / is broken |",
        "| row | dies | **failed**: rank 0: the worker died |",
        "| row | hangs | **failed**: rank 0: no answer within 2.0 s |",
        "| wrong | 2.0e+00 | 1 | **failed** |",
        "**Failed: row, raises**",
    ):
        assert expected in text
    assert text.count("| all is | well |") == 3
    assert "2 sections, 1 failed failing" in capsys.readouterr().out


def test_a_wrong_kernel_fails_its_checks() -> None:
    def without_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool) -> tuple[Tensor, Tensor]:
        return block_forward(q, k, v, False)

    assert not any(check.run().problem for check in attention_checks(CPU))
    with mock.patch("picotron.context_parallel.context_parallel.block_forward", without_mask):
        failed = [check.cells[0] for check in attention_checks(CPU) if check.run().problem]
    assert len(failed) == sum("blocks" in name for name in failed) == 12


# ----------------------------------------------------------------------------------------------------------- the page

WRITTEN = """# GPUs

An introduction.

## Proven without a GPU

a claim

## Results

No run is recorded here yet.

## Estimates

a formula
"""


def test_results_are_merged_into_the_page() -> None:
    first = merged(WRITTEN, {"speed": Result("a GPU", ["fast"], seconds=9), "trace": Result("a GPU", ["### Eager"])})
    assert "No run" not in first
    second = merged(
        first, {"speed": Result("another GPU", ["faster"], {"a row": "an error"}), "machine": Result("a GPU", ["H200"])}
    )
    headings = [line for line in second.splitlines() if line.startswith("## ")]
    titles = [SECTIONS[name].title for name in ("machine", "speed", "trace")]
    assert headings == [f"## {each}" for each in ("Proven without a GPU", "Estimates", "Results", *titles)]
    for kept in ("An introduction.", "a claim", "a formula", "H200", "### Eager", "faster"):
        assert second.count(kept) == 1
    assert "fast\n" not in second
    assert "| Speed and memory | **failed**: 1 | 0 | another GPU |" in second
    assert f"| {titles[2]} | ok | 0 | a GPU |" in second
    assert merged(second, {}) == second


# ------------------------------------------------------------------------------------------- what runs on a GPU machine


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_layout_for_a_number_of_gpus_is_valid_there(gpus: int) -> None:
    with mock.patch("torch.cuda.device_count", return_value=gpus):
        checks = {check.cells[0]: check for check in layout_checks(Options(), {})}
    fitting = {name for name in LAYOUTS if settings(name)[0].distributed.world_size <= max(gpus, 4)}
    names = {name.split(",")[0] for name in checks}
    assert {*fitting, *TWO_RANKS} < names
    assert len(fitting) > 10
    shared = {name: check for name, check in checks.items() if "ranks share a device" in name}
    larger = [name for name in fitting if settings(name)[0].distributed.world_size > gpus]
    assert len(shared) == len(larger) + len(TWO_RANKS) * (gpus < 2)
    assert all(check.cells[2] == "gloo" for check in shared.values())
    assert "dp1 tied kv4 llama, compiled" in checks
    for name in names:
        config, model_config = layout_run(name, Options(), {})
        assert check_layout(config, model_config)
        assert not config.distributed.use_cpu
