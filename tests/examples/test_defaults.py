"""Defaults of the programs in examples/: for pretrained models, from any current folder."""

from pathlib import Path
from typing import Any

import pytest

from examples import distillation, dpo, grpo
from picotron.console import UserError

PROGRAMS: dict[Any, list[str]] = {dpo: [], distillation: ["--teacher", "t"], grpo: ["--reward", "r.py:f"]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_defaults_are_for_pretrained_models(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = program.read_config([*PROGRAMS[program], "--model.name", "DIR", "--dataset.name", "d"])[0]
    assert config.model.pretrained
    assert config.model.dtype == "float32"
    assert config.training.learning_rate <= 2e-5
    with pytest.raises(UserError, match=r"model\.name is missing") as error:
        program.read_config(PROGRAMS[program])
    assert any("dataset.name is missing" in problem for problem in error.value.problems)


def test_the_toy_starts_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    task = grpo.read_task(*grpo.read_config(["--toy"]))
    assert task.reward(prompt="([", completion="])") == 1
    with pytest.raises(UserError, match="--reward is missing"):
        grpo.read_config([])
