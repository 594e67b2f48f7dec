"""Folders of sweeps: names are unique and show the keys that vary, and existing files are kept."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SHELL_SYNTAX
from tests.workbench.sweep.test_create_config import configs, create, error_message
from workbench.run.config_reader import load_config
from workbench.sweep.combinations import folder_names
from workbench.sweep.jobs import Job


def test_folder_names_show_only_the_keys_that_vary(tmp_path: Path) -> None:
    folder = create(tmp_path, "--mbs", 8, "--tp", 1, 4, "--dp", 2, "--training.learning_rate", "1e-3", "3e-4")
    assert sorted(configs(folder)) == [f"tp{tp}_learning_rate{lr}" for tp in (1, 4) for lr in ("0.0003", "0.001")]


def test_folder_names_contain_no_shell_syntax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of the sweep is kept, and quoted in the printed command. Values become distinct words that need no
    quotes.
    """
    values = (SHELL_SYNTAX, SHELL_SYNTAX.upper(), SHELL_SYNTAX + "!", "a/../..", "a/../../", "é")
    folder = create(tmp_path, "--logging.run_name", *values, exp_name=SHELL_SYNTAX)
    written = configs(folder)
    assert [c["logging"]["run_name"] for c in written.values()].count(SHELL_SYNTAX) == 1
    assert len({name.lower() for name in written}) == 6
    assert {path.parent for path in (tmp_path / "out").rglob("config.json")} == {folder / name for name in written}
    for name in written:
        assert shlex.quote(name) == name
        assert load_config(["--config", f"{folder}/{name}/config.json"]).checkpoint.save_dir == f"{folder}/{name}/run"
    python, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert Path(python).samefile(sys.executable)
    assert words == ["submit_slurm_jobs.py", "--inp_dir", str(folder), "--local"]


def test_different_combinations_have_different_folder_names() -> None:
    values = ["1", "1_b2", "2", "1-b2", "1 b2", "x" * 300, "x" * 299, "", " "]
    names = folder_names([{"logging.run_name": a, "dataset.name": b, "model.name": b} for a in values for b in values])
    assert len(set(names)) == len(values) ** 2
    assert names[0].startswith("run_name1_dataset_name1_model_name1")
    assert max(map(len, names)) < 200


def test_existing_configs_are_never_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create(tmp_path, "--tp", 1, 2)
    first = Job(folder / "tp1", "tp1")
    (first.run_folder).mkdir()
    (first.run_folder / "metrics.jsonl").write_text("metrics of the first config\n")
    first.set_status("completed")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}

    def unchanged() -> bool:
        return before.items() <= {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before if p.exists()}.items()

    create(tmp_path, "--tp", 1, 2, 4)
    assert f"3 configs in {folder}: 1 written, 2 unchanged" in capsys.readouterr().out
    assert unchanged()
    message = error_message(tmp_path, "--tp", 1, 2, 8, "--training.seed", 5)
    assert f"2 existing configs differ from the new ones, such as {folder}/tp1/config.json; choose another" in message
    assert unchanged()
    assert not (folder / "tp8").exists()
    first.set_status("running")
    assert "is running; cancel it" in error_message(tmp_path, "--tp", 1, 2, "--training.seed", 5, "--overwrite")
    first.set_status("completed")

    create(tmp_path, "--tp", 1, 2, "--training.seed", 5, "--overwrite")
    assert first.status == "init"
    assert sorted(path.name for path in first.folder.iterdir()) == ["config.json", "earlier.1"]
    for path, (content, _) in before.items():
        if path.parts[-2] != "tp4":
            moved = folder / path.relative_to(folder).parts[0] / "earlier.1" / Path(*path.relative_to(folder).parts[1:])
            assert moved.read_bytes() == content
    assert all(c["training"]["seed"] == 5 for name, c in configs(folder).items() if name != "tp4")


def test_sweep_and_single_run_cannot_share_a_folder(tmp_path: Path) -> None:
    create(tmp_path, "--tp", 1, 2)
    assert "already holds a sweep" in error_message(tmp_path, "--tp", 1)
    folder = create(tmp_path, "--tp", 1, exp_name="one")
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    create(tmp_path, "--tp", 1, exp_name="one")
    assert "already holds a single run" in error_message(tmp_path, "--tp", 1, 2, exp_name="one")
