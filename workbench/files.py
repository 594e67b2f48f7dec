"""Files and folders that are written whole or not at all, locks, and JSON that people and programs may have damaged."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from picotron.console import UserError
from workbench.console import first_line

logger = logging.getLogger("picotron")

UNFINISHED = ".unfinished"  # suffix of a folder that is being written or deleted


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that readers, and a crash of the process or the machine, see either the complete old file or the
    complete new one. If several processes write the same file, the last one wins.

    A process that is killed meanwhile leaves a file NAME.XXXXXXXX.new.
    """
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}.new")
    try:
        with open(new, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def unfinished(path: Path) -> Path:
    """Return the name of a folder while it is written or deleted."""
    return path.with_name(path.name.removesuffix(UNFINISHED) + UNFINISHED)


def delete(folder: Path) -> None:
    """Delete a folder, or only the link if it is one, such as to a larger disk."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context that fills a folder of another name, which gets its own name at the end, in place of an earlier folder.
    After an error it is deleted.

    A process that is killed meanwhile leaves a folder NAME.unfinished. At most one process may write a folder.
    """
    new = unfinished(path)
    if new.exists():
        delete(new)
    new.mkdir(parents=True)
    try:
        yield new
        _sync_folder(new)
        if path.exists():
            delete(path)
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names of the files in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[IO[str] | None]:
    """Context that locks a file. Yields the open file, or None if another process holds the lock.

    The lock lasts until every process that has inherited the file's descriptor has closed it, has ended or was killed.

    Args:
        wait: whether to wait for the other process instead.
    """
    with open(path, "a+") as file:
        is_held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            is_held = False
        except OSError as error:  # some network file systems have no locks
            logger.warning(
                "%s cannot be locked (%s); make sure that no other process writes there", path, error.strerror
            )
        yield file if is_held else None


def parse_json(text: str | bytes, source: str) -> Any:
    """Parse JSON.

    Args:
        source: name of the file or line, for error messages.

    Raises:
        UserError: the text is not JSON, is nested too deeply, or has an object with a duplicate key.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError:
        raise UserError(f"{source} is not UTF-8; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno:,}, column {error.colno:,}" if "\n" in error.doc else f"column {error.colno:,}"
        raise UserError(f"{source} is not valid JSON: {error.msg.removesuffix(' at')} at {place}") from None
    except RecursionError:
        raise UserError(f"{source} is nested too deeply; simplify it") from None
    except ValueError as error:  # a key that occurs twice, a number with too many digits
        raise UserError(f"{source} is not valid JSON: {first_line(error)}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice in an object; keep one of them")
    return data


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: it cannot be read, see also `parse_json`.
    """
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; check the path") from None
    return parse_json(text, str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises a UserError as `read_json`, and for any other value."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a JSON {type(data).__name__}; it should hold an object {{...}}")
    return data


@contextlib.contextmanager
def naming_deleted(folder: Path) -> Iterator[None]:
    """Context whose errors are a UserError if a folder has been deleted meanwhile."""
    try:
        yield
    except Exception as error:
        if folder.exists():
            raise
        raise UserError(
            f"{folder} was deleted while it was read, as a run does with checkpoint.keep_last; use another one"
        ) from error
