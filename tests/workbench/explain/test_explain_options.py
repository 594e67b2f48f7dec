"""`train.py --explain` and its options: what is played, JSON, memory that fits or does not, and hardware."""

import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import train
from picotron.console import UserError
from tests.support.oracle import make_config
from workbench.explain.measure import cores, find_hardware
from workbench.run.config_reader import parse_command_line


@pytest.fixture
def _no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "set_up_logging", lambda *_: None)


@pytest.mark.parametrize("option", [["--gib", "80"], ["--hardware", "H100"]])
def test_options_of_explain_need_it(option: list[str]) -> None:
    with pytest.raises(UserError, match="needs --explain"):
        parse_command_line(["--config", "template/base_config.json", *option])


@pytest.mark.usefixtures("_no_logging")
@pytest.mark.parametrize(
    ("name", "message"),
    [("B300", "none of H100, "), ("mine.json", "cannot read mine.json"), ("this", "no CUDA device")],
)
def test_unknown_hardware_is_rejected(name: str, message: str) -> None:
    words = ["train.py", "--explain", "--config", "template/base_config.json", "--hardware", name]
    with (
        mock.patch.object(sys, "argv", [*words, "--distributed.use_cpu", "false"]),
        pytest.raises(UserError, match=message),
    ):
        train.main()


@pytest.mark.slow
@pytest.mark.processes
def test_rates_of_this_machine_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = make_config()
    start = time.perf_counter()
    measured = find_hardware("this", config)
    assert time.perf_counter() - start < 60
    assert measured.cores == cores()
    assert 1e9 < measured.products["float32"] < 1e12
    assert 0.05 < measured.attention < 2
    with mock.patch("workbench.explain.measure.run_ranks", side_effect=AssertionError("measured again")):
        assert find_hardware("this", config) == measured
