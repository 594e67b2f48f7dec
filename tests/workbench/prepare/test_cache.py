"""The cache: complete and intact entries, one writer at a time, and nothing left of writers that were killed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from picotron.files import locked
from workbench.prepare.cache import CHECKSUMS, cached, main


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


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:10])


@pytest.mark.parametrize("damage", [zeroed, truncated, Path.unlink])
@pytest.mark.parametrize("name", ["/data", CHECKSUMS])
def test_a_damaged_entry_is_written_again(damage: object, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write = Writer()
    entry = cached("kind", "key", write)
    damage(Path(f"{entry}{name}"))  # type: ignore[operator]
    assert cached("kind", "key", write) == entry
    assert write.calls == 2
    assert (entry / "data").read_bytes() == b"12345678" * 1_000
    assert caplog.messages == [f"{entry} is damaged and is written again"]


def test_checksums_are_compared_on_request_and_if_times_differ(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.processes
def test_what_killed_writers_left_is_deleted(folder: Path) -> None:
    program = (
        "import os, signal; from workbench.prepare.cache import cached\n"
        "def write(new):\n    (new / 'data').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached('kind', 'key', write)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert len(list(folder.glob("*.unfinished/data"))) == 1
    cached("another", "key", Writer())
    assert list(folder.glob("*.unfinished")) == []


def test_a_lock_does_not_stop_those_who_only_read() -> None:
    entry = cached("kind", "key", Writer())
    with locked(Path(f"{entry}.lock")):
        assert cached("kind", "key", Writer()) == entry


def test_a_lock_of_another_process_is_waited_for() -> None:
    write = Writer()
    entry = cached("kind", "key", write)
    truncated(entry / "data")
    waiting = threading.Thread(target=cached, args=("kind", "key", write))
    with locked(Path(f"{entry}.lock")):
        waiting.start()
        waiting.join(0.5)
        assert write.calls == 1
    waiting.join()
    assert write.calls == 2
