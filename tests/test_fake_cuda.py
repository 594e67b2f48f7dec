"""Steps on a fake GPU, see `benchmarks.gpu.fake_cuda`: no waits, no mixed devices, and the estimated peak memory."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from benchmarks.gpu.fake_cuda import fake_cuda_environment, obstacle
from tests.support.fake_cuda_layouts import LAYOUTS, MEMORY, Layout

pytestmark = pytest.mark.processes
ReportsOf = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportsOf]:
    """Function that returns the reports of a layout's ranks. One process plays the layouts of all selected tests, and
    the function waits until it has played this one.
    """
    if reason := obstacle():
        pytest.skip(reason)
    tests = [item for item in request.session.items if item.module is request.module]
    names = dict.fromkeys(item.callspec.params["name"] for item in tests)
    program = [sys.executable, "-m", "tests.support.fake_cuda_steps", *names]
    environment = fake_cuda_environment(tmp_path_factory.mktemp("fake_cuda"))
    reports: dict[str, list[dict[str, Any]]] = {}
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as process:

        def wait_for(name: str) -> list[dict[str, Any]]:
            while name not in reports:
                line = process.stdout.readline()
                assert line, f"the program has ended with status {process.wait()}"
                reports.update(json.loads(line))
            return reports[name]

        yield wait_for
        process.kill()


def names(layouts: dict[str, Layout]) -> Iterable[Any]:
    """Parameters of a test. Layouts that are not part of the core have the mark `slow`."""
    return [pytest.param(name, marks=() if layout.core else pytest.mark.slow) for name, layout in layouts.items()]


@pytest.mark.parametrize("name", names(LAYOUTS))
def test_a_step_waits_for_the_gpu_only_once_for_its_metrics(reports_of: ReportsOf, name: str) -> None:
    config, _ = LAYOUTS[name].configs()
    layout = config.distributed
    first = {"copy from cpu to cuda in llama.py rope_frequencies": 1}  # of a run, which here is an evaluation
    if layout.cp_size > 1 and layout.cp_engine == "ulysses":
        first["copy from cpu to cuda in ulysses.py sequence_order"] = 1
    expected = {"evaluation": first, "metrics": {"copy from cuda to cpu in metrics.py end_step": 1}}
    micro_batches = 2 * config.training.gradient_accumulation_steps  # those of the evaluation and of the training step
    for report in reports_of(name):
        assert report["error"] is None, f"rank {report['rank']}: {report['error']}"
        assert report["found"] == expected
        assert report["copies"] == {"cpu to cuda in loader.py local": 2 * micro_batches}  # inputs and targets


@pytest.mark.parametrize(("name", "kernel"), [("cp2 ring zigzag", "cudnn"), ("cp2 ring packed", "flash")])
def test_cudnn_computes_only_blocks_that_recur(reports_of: ReportsOf, name: str, kernel: str) -> None:
    """Documents cut other blocks in each micro-batch, and cuDNN would build a plan for every new shape."""
    for report in reports_of(name):
        kernel_name = f"aten._scaled_dot_product_{kernel}_attention"
        assert set(report["attention"]) == {f"{kernel_name}.default", f"{kernel_name}_backward.default"}


@pytest.mark.parametrize("name", names(MEMORY))
def test_estimated_memory_matches_the_peak_of_a_step(reports_of: ReportsOf, name: str) -> None:
    for report in reports_of(name):
        assert report["estimated_state"] == pytest.approx(report["state"], rel=0.001)
        in_flight = 3.1 * report["message"]  # a rank holds 2 to 7 messages at its peak, the estimate 4
        assert report["estimated_peak"] == pytest.approx(report["peak"], rel=0.01, abs=in_flight)
        passing, estimated = (report[peak] - report["state"] for peak in ("peak", "estimated_peak"))
        assert estimated == pytest.approx(passing, rel=0.03, abs=in_flight), "activations, and what passes by"
