"""The cache: complete and intact entries, one writer at a time, and nothing left of writers that were killed."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from picotron.console import UserError
from picotron.data.cache import CHECKSUMS, cache_folder, cached, main


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


def test_an_entry_is_written_once(folder: Path) -> None:
    write = Writer()
    entries = {cached("kind", "key", write) for _ in range(3)}
    assert write.calls == 1
    assert cached("kind", "another key", write) not in entries
    assert write.calls == 2
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        entry.name for entry in [*entries, cached("kind", "another key", write)]
    }


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:10])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def deleted(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [zeroed, truncated, emptied, deleted])
@pytest.mark.parametrize("name", ["/data", CHECKSUMS])
def test_a_damaged_entry_is_written_again(damage: object, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write = Writer()
    entry = cached("kind", "key", write)
    damage(Path(f"{entry}{name}"))  # type: ignore[operator]
    assert cached("kind", "key", write) == entry
    assert write.calls == 2
    assert (entry / "data").read_bytes() == b"12345678" * 1_000
    assert caplog.messages == [f"{entry} is damaged and is written again"]


def test_checksums_are_compared_on_request_and_if_times_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = Writer()
    data = cached("kind", "key", write) / "data"
    times = data.stat().st_atime_ns, data.stat().st_mtime_ns
    os.utime(data)
    assert cached("kind", "key", write) == data.parent
    main()
    assert capsys.readouterr().out.startswith("1 entries in ")
    zeroed(data)
    os.utime(data, ns=times)
    cached("kind", "key", write)
    with pytest.raises(SystemExit, match=f"error: these entries are damaged; delete them: {data.parent}"):
        main()
    data.unlink()
    assert cached("kind", "key", write) == data.parent
    assert write.calls == 2


def test_a_failed_writer_leaves_nothing(folder: Path) -> None:
    def write(new: Path) -> None:
        (new / "data").write_bytes(bytes(1_000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("kind", "key", write)
    assert [path for path in folder.iterdir() if path.suffix != ".lock"] == []


def test_a_full_disk_is_reported(folder: Path) -> None:
    def write(new: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        UserError, match="cannot be written: No space left on device; free some space, or set XDG_CACHE"
    ):
        cached("kind", "key", write)
    assert [path for path in folder.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.processes
def test_what_killed_writers_left_is_deleted(folder: Path) -> None:
    program = (
        "import os, signal; from picotron.data.cache import cached\n"
        "def write(new):\n    (new / 'data').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached('kind', 'key', write)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert len(list(folder.glob("*.unfinished/data"))) == 1
    cached("another", "key", Writer())
    assert list(folder.glob("*.unfinished")) == []


def test_a_lock_of_another_process_is_announced_and_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write = Writer()
    entry = cached("kind", "key", write)
    emptied(entry / "data")
    locked = threading.Event()

    def hold_lock() -> None:
        with FileLock(f"{entry}.lock"):
            locked.set()
            time.sleep(2)

    threading.Thread(target=hold_lock).start()
    locked.wait()
    start = time.monotonic()
    with caplog.at_level(logging.INFO, "picotron"):
        cached("kind", "key", write)
    assert time.monotonic() - start > 1.5
    assert caplog.messages[0] == f"waiting for another process that writes {entry}"


def test_a_lock_does_not_stop_those_who_only_read() -> None:
    entry = cached("kind", "key", Writer())
    with FileLock(f"{entry}.lock"):
        assert cached("kind", "key", Writer()) == entry


def test_the_cache_needs_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written: Not a directory; free some space, or set XDG_CACHE_HOME"):
        cached("kind", "key", Writer())
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match="there is no home folder for the cache; set XDG_CACHE_HOME"):
        cache_folder()
