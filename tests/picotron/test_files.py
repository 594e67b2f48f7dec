"""Writers of files: two at the same time, and killed ones."""

import os
import time
from pathlib import Path

import pytest

from picotron.files import STALE_SECONDS, write_atomically


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


def test_what_killed_writers_left_is_deleted_and_the_file_of_another_writer_is_not(tmp_path: Path) -> None:
    path = tmp_path / "status[1].txt"
    left, in_use, other = (
        tmp_path / name for name in ("status[1].txt.00000000.new", "status[1].txt.00000001.new", "status1.txt.new")
    )
    for each in (left, in_use, other):
        each.touch()
    for each in (left, other):
        os.utime(each, times=2 * (time.time() - STALE_SECONDS - 60,))
    write_atomically(path, "done\n")
    assert path.read_text() == "done\n"
    assert set(os.listdir(tmp_path)) == {path.name, in_use.name, other.name}


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
