"""Steps on a fake GPU, see `tests.support.fake_cuda`: no waits, no mixed devices, and the estimated peak memory."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.fake_cuda import fake_cuda_environment, obstacle
from tests.support.fake_cuda_layouts import LAYOUTS, MEMORY, Layout
from tests.support.fake_cuda_steps import MISTAKES

pytestmark = pytest.mark.processes
Reports = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Reports of the ranks, by the names that the selected tests have as parameters. One process plays all of them."""
    if reason := obstacle():
        pytest.skip(reason)
    tests = [item for item in request.session.items if item.module is request.module]
    names = dict.fromkeys(item.callspec.params["name"] for item in tests if hasattr(item, "callspec"))
    program = [sys.executable, "-m", "tests.support.fake_cuda_steps", *names]
    environment = fake_cuda_environment(tmp_path_factory.mktemp("fake_cuda"))
    result = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    reports: Reports = defaultdict(list)
    for line in result.stdout.splitlines():
        report = json.loads(line)
        reports[report["name"]].append(report)
    return reports


def names(layouts: dict[str, Layout]) -> Iterable[Any]:
    """Parameters of a test. Layouts that are not part of the core have the mark `parity`."""
    return [pytest.param(name, marks=() if layout.core else pytest.mark.parity) for name, layout in layouts.items()]


@pytest.mark.parametrize("name", names(LAYOUTS))
def test_a_step_waits_for_the_gpu_only_once_for_its_metrics(reports: Reports, name: str) -> None:
    config, _ = LAYOUTS[name].configs()
    layout = config.distributed
    expected = {"metrics": {"copy from cuda to cpu in metrics.py end_step": 1}}
    if layout.cp_size > 1 and layout.cp_engine == "ulysses":  # in the first step of a run, which here is an evaluation
        expected["evaluation"] = {"copy from cpu to cuda in context_parallel.py sequence_order": 1}
    tokens = {
        "cpu to cuda in data.py __next__": 2 * config.training.gradient_accumulation_steps
    }  # evaluation, training
    assert reports[name]
    for report in reports[name]:
        assert report["error"] is None, f"rank {report['rank']}: {report['error']}"
        assert report["found"] == expected
        assert report["copies"] == tokens


FOUND = {  # once in each of the two micro-batches
    "item": "item in train_step.py train_step",
    "comparison in Python": "item in train_step.py train_step",
    "assignment to a boolean index": "aten.index_put_.default has a boolean index in train_step.py train_step",
    "number copied to the GPU": "copy from cpu to cuda in train_step.py train_step",
    "tensor copied to the CPU": "copy from cuda to cpu in train_step.py train_step",
    "index on the CPU": "aten.index.Tensor mixes devices in train_step.py train_step",
    "scalar on the CPU": "aten.add.Tensor mixes devices in train_step.py train_step",
}
RAISED = {"boolean index": "DynamicOutputShapeException", "tensor on the CPU": "FakeTensorDeviceMismatchError"}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_micro_batch_is_found(reports: Reports, name: str) -> None:
    [report] = reports[name]
    if name in RAISED:
        assert RAISED[name] in report["error"]
    else:
        assert report["error"] is None
        assert report["found"]["train_step"] == {FOUND[name]: 2}


@pytest.mark.parametrize("name", names(MEMORY))
def test_estimated_memory_matches_the_peak_of_a_step(reports: Reports, name: str) -> None:
    assert reports[name]
    for report in reports[name]:
        assert report["estimated_state"] == pytest.approx(report["state"], rel=0.001)
        assert report["estimated_peak"] == pytest.approx(report["peak"], rel=0.01)
