"""Cache of tokens and tokenizers: folders that are complete or absent, each written by one process at a time."""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from picotron.console import UserError
from picotron.files import UNFINISHED, locked, new_folder

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
    if entry.exists():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _delete_unfinished(entry.parent)
        lock_file = entry.with_suffix(LOCK)
        with locked(lock_file) as is_free:
            if not is_free:
                logger.warning("waiting for another process that writes %s", entry)
        with locked(lock_file, wait=True):
            if not entry.exists():  # no other process has written it meanwhile
                with new_folder(entry) as new:
                    write(new)
                    _flush(new)
    except OSError as error:
        raise UserError(
            f"the cache {entry.parent} cannot be written: {error.strerror}; free some space, or set XDG_CACHE_HOME to "
            f"another folder"
        ) from None
    return entry


def _flush(folder: Path) -> None:
    """Flush the contents of files to the disk, so that a folder with its final name is complete after a crash."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _delete_unfinished(folder: Path) -> None:
    """Delete the incomplete entries of killed processes."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with locked(path.with_suffix(LOCK)) as lock:
            if lock:
                shutil.rmtree(path)
