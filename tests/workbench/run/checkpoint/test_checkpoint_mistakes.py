"""Damaged checkpoints, checkpoints of other models and wrong folders are rejected with an error that names them."""

import re
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from tests.support.checkpoints import Run, first_half, mistake, model_of, run_config, warnings_of
from tests.support.messages import error_of
from tests.support.oracle import tiny_llama
from workbench.run.checkpoint.checkpoint import Checkpoint, read_state
from workbench.run.run_folder import checkpoint_folders

WEIGHTS, MOMENTS = "model-00002-of-00002.safetensors", "exp_avg_sq-00001-of-00002.safetensors"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = [
    (WEIGHTS, lambda path: flip(path, -7), r"is damaged: the checksum of bytes \d+ to \d+"),
    (MOMENTS, lambda path: flip(path, 5000), "is damaged"),
    (WEIGHTS, truncate, "has .* bytes, but .* were written"),
    (WEIGHTS, Path.unlink, "is missing"),
    ("config.json", lambda path: path.write_text(path.read_text().replace("32", "64")), "is damaged"),
    ("trainer_state.json", Path.unlink, "is missing"),
    (
        "trainer_state.json",
        lambda path: path.write_text(path.read_text().replace('"step": 5', '"step": 6')),
        "is damaged",
    ),
]


def mistakes(configs: list[Config], model_config: LlamaConfig) -> list[str]:
    return [mistake(config, model_config) for config in configs]


def test_damaged_checkpoints_raise_errors_that_name_the_file(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    """Two ranks verify the checksums, each those of some of the bytes."""
    configs = []
    run(first_half(tmp_path, "pp2"), model_of(True))
    for number, (file, damage, _) in enumerate(DAMAGES):
        folder = Path(shutil.copytree(tmp_path / "step_00000005", tmp_path / f"{number}"))
        damage(folder / file)
        configs.append(run_config(tmp_path / "run", "dp2", checkpoint__load_path=str(folder)))
    first, second = pool.run(mistakes, 2, configs, model_of(True))
    assert first == second
    for message, (file, _, expected), config in zip(first, DAMAGES, configs, strict=True):
        assert re.fullmatch(f"{config.checkpoint.load_path}/{file} {expected}.*", message), message


def test_latest_skips_damaged_checkpoints(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    keys = {"checkpoint__save_frequency": 2, "checkpoint__load_path": "latest"}
    run(run_config(tmp_path, **keys))
    assert list(checkpoint_folders(tmp_path)) == [2, 4, 6, 8, 10]
    truncate(tmp_path / "step_00000010" / "model.safetensors")
    flip(tmp_path / "step_00000008" / "exp_avg_sq.safetensors", 5000)
    config = run_config(tmp_path, "dp2", checkpoint__load_path="latest", checkpoint__save_frequency=None)
    for steps, lines in pool.run(warnings_of, 2, config):
        assert steps == 4
        assert len(lines) == 2
        assert lines[0].startswith(f"{tmp_path}/step_00000010/model.safetensors has ")
        assert lines[1].startswith(f"{tmp_path}/step_00000008/exp_avg_sq.safetensors is damaged")


def test_latest_stops_if_no_checkpoint_is_intact(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    keys = {"checkpoint__save_frequency": 5, "checkpoint__load_path": "latest"}
    run(run_config(tmp_path, **keys))
    for folder in checkpoint_folders(tmp_path).values():
        (folder / "trainer_state.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    message = pool.run(mistake, 1, run_config(tmp_path, **keys))[0]
    assert f"none of the 2 checkpoints in {tmp_path} is intact; choose another load_path" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoint_of_a_different_model_is_rejected(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    run(first_half(tmp_path), model_of(True))
    other = tiny_llama(
        tie_word_embeddings=True, num_attention_heads=8, rope_parameters={"rope_type": "default", "rope_theta": 9.0}
    )
    config = run_config(tmp_path, "dp2", checkpoint__load_path="latest")
    for line in pool.run(mistake, 2, config, other):
        assert "rope_parameters={'rope_theta': 500.0, 'rope_type': 'default'}, but this run's model has" in line


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "is not a folder"),
        ("step_00000005.unfinished", "is an incomplete checkpoint"),
        ("a run", "is a run folder; use one of its checkpoints"),
        ("its start", "is a run folder without checkpoints"),
    ],
)
def test_folder_without_a_checkpoint_is_rejected(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "step_00000005.unfinished").mkdir()
    (tmp_path / "a run" / "step_00000008").mkdir(parents=True)
    (tmp_path / "its start").mkdir()
    (tmp_path / "its start" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=sentence):
        read_state(tmp_path / name)


def checkpoint_of_this_machine(*folders: Path) -> str:
    return error_of(lambda: Checkpoint(folders[dist.get_rank()]).weights())


def test_machines_with_other_checkpoints_of_a_name_are_rejected(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        config = run_config(tmp_path / str(seed), training__seed=seed)
        run(config)
        folders += checkpoint_folders(tmp_path / str(seed)).values()
    sentences = pool.run(checkpoint_of_this_machine, 2, *folders)
    assert all("is another checkpoint for rank 1 than for rank 0" in sentence for sentence in sentences)
