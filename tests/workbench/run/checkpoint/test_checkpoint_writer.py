"""Writing checkpoints: in the background, on full disks, and next to old checkpoints that cannot be deleted."""

import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.optimizer import AdamW
from tests.support.checkpoints import Run, assert_same_tensors, first_half, mistake, model_of, run_config, train
from workbench.run.checkpoint import safetensors_folder, writer
from workbench.run.checkpoint.writer import CheckpointWriter
from workbench.run.metrics import Progress
from workbench.run.run_folder import checkpoint_folder, checkpoint_folders, delete_checkpoint


def train_and_write_the_first_checkpoint_late(config: Config, model_config: LlamaConfig) -> list[list[int]]:
    """Train, and return the addresses of the buffers at each checkpoint."""
    write, addresses = CheckpointWriter._write, []

    def late(self: CheckpointWriter, progress: Progress, *others: Any) -> None:
        addresses.append([buffer.data_ptr() for buffer in self.buffers.buffers])
        time.sleep(progress.step == 1)
        write(self, progress, *others)

    with mock.patch.object(CheckpointWriter, "_write", late):
        train(config, model_config)
    return addresses


def test_checkpoints_of_a_thread_are_those_of_their_steps_and_share_buffers(pool: WorkerPool, tmp_path: Path) -> None:
    """The second one is due before the first one is written."""
    layout, model, frequent = "dp2 tp2 bfloat16", model_of(True), {"checkpoint__save_frequency": 1}
    pool.run(train, 4, first_half(tmp_path / "sync", layout, **frequent), model)
    config = first_half(tmp_path / "async", layout, checkpoint__async_save=True, **frequent)
    addresses = pool.run(train_and_write_the_first_checkpoint_late, 4, config, model)
    for step in (1, 2):
        assert_same_tensors(*(checkpoint_folder(tmp_path / name, step) for name in ("async", "sync")))
    for rank, (first, *others) in enumerate(addresses):
        assert others == [first] * 4
        assert bool(first) == (rank < 2)  # ranks with dp rank 1 save nothing


def train_and_list_what_is_synchronised(config: Config) -> list[Path]:
    synchronised = []
    with mock.patch.object(
        os, "fsync", lambda number: synchronised.append(Path(os.readlink(f"/proc/self/fd/{number}")))
    ):
        train(config)
    return synchronised


@pytest.mark.linux
def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name_and_then_the_name_is(
    pool: WorkerPool, tmp_path: Path
) -> None:
    ((*files, folder, parent),) = pool.run(train_and_list_what_is_synchronised, 1, run_config(tmp_path))
    assert {path.name for path in files} == {path.name for path in (tmp_path / "step_00000010").iterdir()}
    assert (folder, parent) == (tmp_path / "step_00000010.unfinished", tmp_path)


def train_on_a_full_disk(config: Config, model_config: LlamaConfig) -> tuple[str, int]:
    """Train while the disk of the last rank is full. Returns the error and the number of steps."""

    def on_a_full_disk(*_: Any) -> Any:
        return open("/dev/full", "wb")

    take_step, steps = AdamW.step, []

    def counted(self: AdamW) -> None:
        take_step(self)
        steps.append(1)
        time.sleep(0.3)  # gives the background thread time to fail before the next step

    is_full = dist.get_rank() == dist.get_world_size() - 1
    opened = mock.patch.object(safetensors_folder, "open", on_a_full_disk if is_full else open, create=True)
    with opened, mock.patch.object(AdamW, "step", counted):
        return mistake(config, model_config), len(steps)


@pytest.mark.linux
@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_full_disk_raises_the_same_error_on_all_ranks(
    pool: WorkerPool, run: Run, tmp_path: Path, in_background: bool
) -> None:
    """The disk fills up within a file, while other ranks still gather; the earlier checkpoint remains usable."""
    layout, model = "tp2", model_of(True)
    keys = {"checkpoint__load_path": "latest", "checkpoint__async_save": in_background}
    run(first_half(tmp_path, layout, **keys), model)
    config = run_config(tmp_path, layout, **keys | {"checkpoint__save_frequency": 6})
    results = pool.run(train_on_a_full_disk, 2, config, model)
    # In the background, the error is raised in one of the next steps, long before the next checkpoint is due.
    assert results == [results[0]] * 2
    assert results[0][1] in range(2, 6) if in_background else results[0][1] == 1
    assert f"{tmp_path}/step_00000006 cannot be written: No space left on device" in results[0][0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]
    complete = run_config(tmp_path, layout, **keys)
    assert [len(run(complete, model)["losses"]) for _ in range(2)] == [5, 0]


@pytest.mark.parametrize(("frequency", "steps"), [(4, [4, 8, 10]), (0, [10]), (None, [])])
def test_a_finished_run_has_a_checkpoint_unless_the_config_says_none(
    run: Run, tmp_path: Path, frequency: int | None, steps: list[int]
) -> None:
    run(run_config(tmp_path, checkpoint__save_frequency=frequency))
    assert list(checkpoint_folders(tmp_path)) == steps


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder := checkpoint_folder(tmp_path, 5)).mkdir()
    busy = OSError(39, "Directory not empty")  # the error of network file systems for open files
    with mock.patch.object(shutil, "rmtree", side_effect=busy):
        delete_checkpoint(folder)
    assert caplog.messages == [f"{folder} cannot be deleted: Directory not empty"]
    assert not checkpoint_folders(tmp_path)


def start_with_a_folder_of_its_own(*configs: Config) -> str:
    with mock.patch.object(writer, "NFS_CACHE_SECONDS", 0):
        return mistake(configs[dist.get_rank()])


def test_a_save_dir_that_machines_do_not_share_is_an_error_before_the_first_step(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    for load_path, expected in (
        ("", "rank 1 does not see the files of rank 0 in"),
        ("latest", "rank 1 sees 0 checkpoints in"),
    ):
        configs = [run_config(folder, "dp2", checkpoint__load_path=load_path) for folder in folders]
        for sentence in pool.run(start_with_a_folder_of_its_own, 2, *configs):
            assert sentence.startswith(expected)
        checkpoint_folder(folders[0], 1).mkdir(exist_ok=True)
