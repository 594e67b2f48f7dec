"""Damaged checkpoints, checkpoints of other models and wrong folders are rejected with an error that names them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from tests.support.checkpoints import mistake, model_of, run, run_config, warnings_of
from tests.support.oracle import tiny_llama
from workbench.run.checkpoint.checkpoint import Checkpoint
from workbench.run.run_folder import checkpoint_folders


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def damage(folder: Path, how: str) -> None:
    single = "model.safetensors" if (folder / "model.safetensors").exists() else "model-00002-of-00002.safetensors"
    if how == "flipped weight":
        flip(folder / single, -7)
    elif how == "flipped moment":
        flip(next(iter(sorted(folder.glob("exp_avg_sq*.safetensors")))), 5000)
    elif how == "truncated":
        path = folder / single
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "missing":
        (folder / single).unlink()
    elif how == "config":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("32", "64"))
    elif how == "no state":
        (folder / "trainer_state.json").unlink()


DAMAGES = {
    "flipped weight": r"model.*safetensors is damaged: the checksum of bytes \d+ to \d+",
    "flipped moment": "exp_avg_sq.*safetensors is damaged",
    "truncated": "model.*safetensors has .* bytes, but .* were written",
    "missing": "model.*safetensors is missing",
    "config": r"config\.json is damaged",
    "no state": r"trainer_state\.json is missing",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_checkpoint_raises_an_error_that_names_the_file(
    pool: WorkerPool, checkpoint_at_step_5: Any, tokenizer: Path, tmp_path: Path, how: str
) -> None:
    """Two ranks verify the checksums, each those of some of the bytes."""
    folder = Path(shutil.copytree(checkpoint_at_step_5(1, True), tmp_path / "step_00000005"))
    damage(folder, how)
    config = run_config(tmp_path / "run", {"dp_size": 2}, checkpoint__load_path=str(folder))
    messages = pool.run(mistake, 2, config, model_of(True), tokenizer)
    assert messages[0] == messages[1]
    (line,) = messages[0].splitlines()
    assert line.startswith(str(folder))
    assert re.search(DAMAGES[how], line), line


def test_latest_skips_damaged_checkpoints(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    keys = {"checkpoint__save_frequency": 2, "checkpoint__load_path": "latest"}
    run(pool, run_config(tmp_path, {}, **keys), model_of(False), tokenizer)
    assert list(checkpoint_folders(tmp_path)) == [2, 4, 6, 8, 10]
    damage(tmp_path / "step_00000010", "truncated")
    damage(tmp_path / "step_00000008", "flipped moment")
    config = run_config(tmp_path, {"dp_size": 2}, checkpoint__load_path="latest", checkpoint__save_frequency=None)
    for steps, lines in pool.run(warnings_of, 2, config, model_of(False), tokenizer):
        assert steps == 4
        assert len(lines) == 2
        assert lines[0].startswith(f"{tmp_path}/step_00000010/model.safetensors has ")
        assert lines[1].startswith(f"{tmp_path}/step_00000008/exp_avg_sq.safetensors is damaged")


def test_latest_stops_if_no_checkpoint_is_intact(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    keys = {"checkpoint__save_frequency": 5, "checkpoint__load_path": "latest"}
    run(pool, run_config(tmp_path, {}, **keys), model_of(False), tokenizer)
    for folder in checkpoint_folders(tmp_path).values():
        damage(folder, "no state")
    before = sorted(tmp_path.rglob("*"))
    message = pool.run(mistake, 1, run_config(tmp_path, {}, **keys), model_of(False), tokenizer)[0]
    assert f"none of the 2 checkpoints in {tmp_path} is intact; choose another load_path" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoint_of_a_different_model_is_rejected(
    pool: WorkerPool, checkpoint_at_step_5: Any, tokenizer: Path, tmp_path: Path
) -> None:
    other = tiny_llama(
        tie_word_embeddings=True, num_attention_heads=8, rope_parameters={"rope_type": "default", "rope_theta": 9.0}
    )
    config = run_config(tmp_path, {"dp_size": 2}, checkpoint__load_path=str(checkpoint_at_step_5(0, True)))
    for line in pool.run(mistake, 2, config, other, tokenizer):
        assert "rope_parameters={'rope_theta': 500.0, 'rope_type': 'default'}, but this run's model has" in line


def test_folder_without_a_checkpoint_is_rejected(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "step_00000005.unfinished").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "a run" / "step_00000008").mkdir(parents=True)
    for name, message in {
        "nowhere": "is not a folder",
        "step_00000005.unfinished": "is an incomplete checkpoint",
        "empty": "has no readable config.json",
        "a run": "is a run folder",
    }.items():
        config = run_config(tmp_path / "run", {}, checkpoint__load_path=str(tmp_path / name))
        assert message in pool.run(mistake, 1, config, model_of(True), tokenizer)[0]


def checkpoint_of_this_machine(*folders: Path) -> str:
    with pytest.raises(UserError) as error:
        Checkpoint(folders[dist.get_rank()]).weights()
    return str(error.value)


def test_machines_with_other_checkpoints_of_a_name_are_rejected(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path
) -> None:
    folders = []
    for seed in (1, 2):
        config = run_config(tmp_path / str(seed), {}, training__seed=seed)
        run(pool, config, model_of(False), tokenizer)
        folders += checkpoint_folders(tmp_path / str(seed)).values()
    sentences = pool.run(checkpoint_of_this_machine, 2, *folders)
    assert all("is another checkpoint for rank 1 than for rank 0" in sentence for sentence in sentences)


def latest_of_two_machines(first: Config, second: Config, model_config: LlamaConfig, tokenizer: Path) -> str:
    return mistake(second if dist.get_rank() else first, model_config, tokenizer)


def test_save_dir_not_shared_by_all_machines_is_rejected(
    pool: WorkerPool, checkpoint_at_step_5: Any, tokenizer: Path, tmp_path: Path
) -> None:
    configs = [
        run_config(folder, {"dp_size": 2}, checkpoint__load_path="latest")
        for folder in (checkpoint_at_step_5(0, False).parent, tmp_path)
    ]
    for message in pool.run(latest_of_two_machines, 2, *configs, model_of(False), tokenizer):
        assert "rank 1 sees 0 checkpoints in" in message
