"""Writers of files that do not follow links: a link that somebody has put into a folder must not make a program
overwrite another file.
"""

import glob
import os
import time
from pathlib import Path

STALE_SECONDS = 3600  # age of an unfinished file that no process writes any more: writing one takes seconds


def create(path: str, flags: int) -> int:
    """Open a file for writing, but raise an OSError if it is a link: an `opener` for `open`. Mode "r+" creates the
    file, too.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(error.errno, "it is a link, and links are not followed", path) from None
        raise


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that readers, and a crash of the process or the machine, see either the complete old file or the
    complete new one. If several processes write the same file, the last one wins.

    A process that is killed leaves a file NAME.XXXXXXXX.new; a later write of the same file deletes it.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.????????.new"):
        if _age(left) > STALE_SECONDS:
            left.unlink(missing_ok=True)
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}.new")
    try:
        with open(new, "xb", opener=create) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _age(path: Path) -> float:
    """Return the seconds since a file was changed; 0 if another process has just deleted it."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
