"""Writers of files that do not follow links: a link that somebody has put into a folder must not make a program
overwrite another file.
"""

import os
from pathlib import Path


def create(path: str, flags: int) -> int:
    """Open a file for writing, but raise an OSError if it is a link: an `opener` for `open`. Mode "r+" creates the
    file, too.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that readers, and a crash, see either the complete old file or the complete new one."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # of a process that was killed, or a link to another file
    with open(new, "xb", opener=create) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    new.replace(path)
