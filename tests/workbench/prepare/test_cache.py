"""The cache: complete entries, and one writer at a time."""

import threading
from pathlib import Path
from typing import Any

import pytest

from workbench.files import locked
from workbench.prepare.cache import cached


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "picotron"


class Writer:
    """Writes an entry, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, new: Path) -> None:
        self.calls += 1
        (new / "data").write_bytes(b"12345678" * 1_000)


def test_an_entry_that_is_completed_while_leftovers_are_deleted_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process lists an entry that another one is writing, which completes it before the first one tries its lock; the
    same happens if the other one deletes a leftover.
    """
    for name in ("kind-finished", "kind-deleted"):
        (folder / f"{name}.unfinished").mkdir(parents=True)

    def late(path: Path, wait: bool = False) -> Any:
        if path.name == "kind-finished.lock" and (folder / "kind-finished.unfinished").exists():
            (folder / "kind-finished.unfinished").rename(folder / "kind-finished")
        if path.name == "kind-deleted.lock" and (folder / "kind-deleted.unfinished").exists():
            (folder / "kind-deleted.unfinished").rmdir()
        return locked(path, wait)

    monkeypatch.setattr("workbench.prepare.cache.locked", late)
    assert cached("kind", "key", Writer()).exists()
    assert (folder / "kind-finished").exists()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_entry_is_written_again(damage: str) -> None:
    write = Writer()
    file = cached("kind", "key", write) / "data"
    if damage == "cut":
        file.write_bytes(b"123")
    else:
        file.unlink()
    assert cached("kind", "key", write) / "data" == file
    assert (write.calls, file.stat().st_size) == (2, 8_000)


def test_a_writer_waits_for_another_one_and_takes_its_entry(folder: Path) -> None:
    write, entry = Writer(), cached("kind", "key", Writer())
    entry.rename(folder / "elsewhere")
    waiting = threading.Thread(target=cached, args=("kind", "key", write))
    with locked(Path(f"{entry}.lock")):
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        (folder / "elsewhere").rename(entry)
        assert cached("kind", "key", write) == entry  # is read without the lock
    waiting.join()
    assert write.calls == 0
