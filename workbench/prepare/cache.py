"""Cache of tokens and tokenizers: folders that are complete, and written by one process at a time.

    python -m workbench.prepare.cache

compares all entries with their checksums. A run only compares sizes and times of change.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import xxhash

from picotron.console import UserError
from picotron.files import UNFINISHED, locked, new_folder, write_atomically

logger = logging.getLogger("picotron")

CHECKSUMS = ".json"  # suffix of the file with the checksum, size and time of change of each file of an entry
LOCK = ".lock"  # suffix of the file that the writer of an entry locks


def cache_folder() -> Path:
    """Return the folder of the cache: `picotron` in XDG_CACHE_HOME, by default in ~/.cache.

    Raises:
        UserError: there is no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "picotron")
    except RuntimeError:
        raise UserError("there is no home folder for the cache; set XDG_CACHE_HOME to a folder") from None


def cached(kind: str, key: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of a cache entry. If there is none, or if it is damaged, call `write(new_folder)` first.

    Args:
        kind, key: name of the entry, and a string that determines its contents.

    Raises:
        UserError: the cache cannot be written.
    """
    entry = cache_folder() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    if _is_intact(entry):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _delete_unfinished(entry.parent)
        lock_file = entry.with_suffix(LOCK)
        with locked(lock_file) as is_free:
            if not is_free:
                logger.warning("waiting for another process that writes %s", entry)
        with locked(lock_file, wait=True):
            if not _is_intact(entry):  # no other process has written it meanwhile
                if entry.exists():
                    logger.warning("%s is damaged and is written again", entry)
                with new_folder(entry) as new:
                    write(new)
                    by_name = {name: [checksum, *_state(new / name)] for name, checksum in checksums(new).items()}
                    write_atomically(entry.with_suffix(CHECKSUMS), json.dumps(by_name))
    except OSError as error:
        raise UserError(
            f"the cache {entry.parent} cannot be written: {error.strerror}; free some space, or set XDG_CACHE_HOME to "
            f"another folder"
        ) from None
    return entry


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each file of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): _checksum(path) for path in files}


def _is_intact(entry: Path, read_all: bool = False) -> bool:
    """Return whether an entry exists and its files are unchanged. Files with the same size and time of change are not
    read, unless `read_all`.
    """
    try:
        return all(
            (not read_all and _state(entry / name) == state) or _checksum(entry / name) == checksum
            for name, (checksum, *state) in json.loads(entry.with_suffix(CHECKSUMS).read_text()).items()
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False


def _state(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while data := file.read(2**22):
            digest.update(data)
    return digest.hexdigest()


def _delete_unfinished(folder: Path) -> None:
    """Delete the incomplete entries of killed processes."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with locked(path.with_suffix(LOCK)) as lock:
            if lock:
                shutil.rmtree(path)


def main() -> None:
    entries = [path.with_suffix("") for path in sorted(cache_folder().glob(f"*{CHECKSUMS}"))]
    damaged = [str(entry) for entry in entries if not _is_intact(entry, read_all=True)]
    if damaged:
        sys.exit(f"error: these entries are damaged; delete them: {' '.join(damaged)}")
    print(f"{len(entries)} entries in {cache_folder()} match their checksums")


if __name__ == "__main__":
    main()
