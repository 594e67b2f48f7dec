"""Cache of tokens and tokenizers: folders that are complete or absent, each written by one process at a time.

An entry has a lock. Whoever holds it may write the entry, or delete what a killed writer has left of it. The file of
the lock has the sizes of the entry's files, so that an entry from which something was lost is written again.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from picotron.console import UserError
from workbench.files import UNFINISHED, locked, new_folder

logger = logging.getLogger("picotron")

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
    """Return the folder of a cache entry. If there is none, call `write(new_folder)` first.

    Args:
        kind, key: name of the entry, and a string that determines its contents.

    Raises:
        UserError: the cache cannot be written.
    """
    entry = cache_folder() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    lock_file = entry.with_suffix(LOCK)
    try:
        if is_whole(entry, lock_file):
            return entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        _delete_unfinished(entry.parent)
        with locked(lock_file) as lock:
            if lock is None:
                logger.warning("waiting for another process that writes %s", entry)
        with locked(lock_file, wait=True) as lock:
            if not is_whole(entry, lock_file):  # no other process has written it meanwhile
                if entry.exists():
                    logger.warning("%s is damaged, and is written again", entry)
                with new_folder(entry) as new:
                    write(new)
                    _flush(new)
                assert lock is not None
                lock.truncate(0)
                lock.write(json.dumps(sizes_of(entry)))
    except OSError as error:
        raise UserError(
            f"the cache {entry.parent} cannot be written: {error.strerror}; free some space, or set XDG_CACHE_HOME to "
            f"another folder"
        ) from None
    return entry


def is_whole(entry: Path, lock_file: Path) -> bool:
    """Return whether an entry exists, with all the files that were written. (Entries of earlier versions: any.)"""
    written = lock_file.read_text() if lock_file.exists() else ""
    return entry.exists() and (not written or written == json.dumps(sizes_of(entry)))


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the sizes of all files in a folder, by their names."""
    files = sorted(filter(Path.is_file, folder.rglob("*")))
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _flush(folder: Path) -> None:
    """Flush the contents of files to the disk, so that a folder with its final name is complete after a crash."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _delete_unfinished(folder: Path) -> None:
    """Delete the incomplete entries of killed processes. What cannot be deleted does no harm."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with locked(path.with_suffix(LOCK)) as lock:
            if lock:  # so nobody else writes or deletes it
                shutil.rmtree(path, ignore_errors=True)
