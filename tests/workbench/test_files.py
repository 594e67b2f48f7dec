"""Writers of files: two at the same time, and the order of writes to the disk."""

import os
from pathlib import Path

import pytest

from picotron.console import UserError
from workbench.files import naming_deleted, write_atomically
from workbench.run.run_folder import delete_checkpoint


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one writes while the first one has not finished."""
    path, fsync = tmp_path / "status.txt", os.fsync

    def interrupted(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_atomically(path, "second")
        assert path.read_text() == "second"

    monkeypatch.setattr(os, "fsync", interrupted)
    write_atomically(path, "first")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["status.txt"]


@pytest.mark.linux
def test_a_file_is_on_the_disk_before_it_gets_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fsync(descriptor: int) -> None:
        synced = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((synced == tmp_path, (tmp_path / "config.json").read_text()))
        if synced != tmp_path:
            assert synced.read_text() == "new"

    (tmp_path / "config.json").write_text("old")
    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "config.json", "new")
    assert seen == [(False, "old"), (True, "new")]


def test_a_folder_that_was_deleted_is_named_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no repository"), naming_deleted(tmp_path):
        raise OSError("no repository of this name")
    with pytest.raises(UserError, match="step_1 was deleted while it was read"), naming_deleted(tmp_path / "step_1"):
        raise OSError("no repository of this name")


def test_of_a_link_to_a_folder_only_the_link_is_deleted(tmp_path: Path) -> None:
    """A checkpoint may have moved to a larger disk."""
    (tmp_path / "far").mkdir()
    (tmp_path / "step_00000001").symlink_to(tmp_path / "far")
    delete_checkpoint(tmp_path / "step_00000001")
    assert os.listdir(tmp_path) == ["far"]
