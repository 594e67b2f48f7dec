"""docs/programs/compare.py: the largest relative difference of two runs, and when a comparison fails."""

import json
import math
import sys
from pathlib import Path
from unittest import mock

import pytest

from docs.programs import compare


def write(folder: Path, numbers: list[tuple[int, float, float]]) -> Path:
    folder.mkdir()
    records = [{"step": step, "loss": loss, "grad_norm": norm, "tokens": 8} for step, loss, norm in numbers]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def run(*arguments: object) -> object:
    with mock.patch.object(sys, "argv", ["compare", *map(str, arguments)]):
        try:
            compare.main()
        except SystemExit as stop:
            return stop.code
    return 0


def test_largest_relative_difference_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [(1, 4.0, 2.0), (2, 2.0, 1.0)])
    other = write(tmp_path / "other", [(1, 4.0, 2.0 + 2e-6), (2, 2.0 + 1e-6, 1.0)])
    assert run(one, one) == 0
    assert run(one, other) == "DIFFERENT from step 1 on: grad_norm 2 and 2.000002"
    assert run(one, other, "--tolerance", 2e-6) == 0
    line = "2 steps, largest relative difference of losses and gradient norms: "
    assert capsys.readouterr().out == f"{line}0e+00\n{line}1e-06\n{line}1e-06\n"
    assert (
        run(one, write(tmp_path / "nan", [(1, 4.0, 2.0), (2, math.nan, 1.0)]))
        == "DIFFERENT from step 2 on: loss 2 and nan"
    )


def test_runs_of_different_steps_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"different steps: \[1, 2\] and \[1\]"):
        compare.largest_difference({1: [1.0], 2: [1.0]}, {1: [1.0]})
    with pytest.raises(SystemExit, match="different steps"):
        compare.largest_difference({}, {})
    assert run(tmp_path / "none", tmp_path) == (
        f"error: cannot read {tmp_path}/none/metrics.jsonl: No such file or directory; give folders of runs"
    )


def test_numbers_that_are_0_can_be_compared() -> None:
    assert compare.largest_difference({1: [1.0, 0.0]}, {1: [1.0, 0.0]}) == 0
    assert compare.largest_difference({1: [1.0, 0.0]}, {1: [1.0, 1e-30]}) == math.inf
