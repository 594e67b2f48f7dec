"""The priced step: times of operations, of fused kernels and of groups."""

import subprocess
import sys

import pytest

from benchmarks.roofline import GROUPS, SOFTMAX, Operation, compiled, eager
from picotron.hardware import HARDWARE
from tests.support.fake_cuda import obstacle

H200 = HARDWARE["H200"]
ROTATION = "rotation, SwiGLU, residuals"


def operation(group: str, reads: dict[int, int], writes: dict[int, int]) -> Operation:
    return Operation(group, sum((*reads.values(), *writes.values())) / H200.memory, reads, writes)


def test_fused_operations_move_only_what_comes_from_outside_or_is_needed_outside() -> None:
    size = 2**30
    operations = [
        operation("matrices", {1: size}, {2: size}),
        operation("norms", {2: size}, {3: size}),  # 3 is read by its neighbour only
        operation(ROTATION, {3: size}, {4: size}),
        operation("matrices", {4: size}, {5: size}),
        operation(ROTATION, {5: size}, {6: size}),  # nothing reads 6
    ]
    times = {name: seconds * H200.memory / size for name, seconds in eager(operations).items() if seconds}
    assert times == pytest.approx({"matrices": 4, "norms": 2, ROTATION: 4})
    times = {name: seconds * H200.memory / size for name, seconds in compiled(operations, H200).items() if seconds}
    assert times == pytest.approx({"matrices": 4, "norms": 1, ROTATION: 1 + 1})


def test_compiled_softmax_moves_four_times_the_logits() -> None:
    size = 2**30
    operations = [
        operation("products of the loss", {}, {1: size}),
        operation(SOFTMAX, {1: size}, {2: 2 * size}),  # exponentials, in float32
        operation(SOFTMAX, {2: 2 * size}, {1: size}),  # the gradient
        operation("products of the loss", {1: size}, {}),
    ]
    assert eager(operations)[SOFTMAX] * H200.memory / size == pytest.approx(6)
    assert compiled(operations, H200)[SOFTMAX] * H200.memory / size == pytest.approx(4)


@pytest.mark.parity
@pytest.mark.processes
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_times_of_products_follow_from_the_formula() -> None:
    """Two layers of SmolLM-1.7B: six FLOPs for each weight of the layers' matrices and each token."""
    command = [sys.executable, "-m", "benchmarks.roofline", "--model", "smollm-1.7b", "--model.num_hidden_layers", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    rows = {line.split("  ")[0]: line.split()[-5:] for line in result.stdout.splitlines()[2:]}
    assert set(GROUPS) < rows.keys()
    weights = 2 * (4 * 2048 * 2048 + 3 * 2048 * 8192)
    milliseconds = 6 * weights * 4 * 8192 / H200.rate("bfloat16") * 1e3
    words = next(line for line in result.stdout.splitlines() if line.startswith("matrices")).split()
    assert float(words[1]) == pytest.approx(milliseconds, abs=0.1)
    assert "nothing ran on a GPU" in result.stdout
