"""Files: written whole or not at all, and JSON that people and programs may have damaged."""

import glob
import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from picotron.console import UserError, first_line

STALE_SECONDS = 3600  # age of an unfinished file that no process writes any more: writing one takes seconds


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
        with open(new, "xb") as file:
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


def trace_path(run_dir: str | Path, step: int) -> Path:
    """Return the trace of a step in a run's folder."""
    return Path(run_dir, f"trace_step_{step:08d}.jsonl")


def trace_files(run_dir: Path) -> dict[int, Path]:
    """Return the traces of steps in a run's folder by step, in ascending order."""
    matches = (re.fullmatch(r"trace_step_([0-9]{8})\.jsonl", path.name) for path in run_dir.glob("trace_step_*"))
    return dict(sorted((int(match[1]), run_dir / match[0]) for match in matches if match))


def parse_json(text: str | bytes, source: str) -> Any:
    """Parse JSON.

    Args:
        source: name of the file or line, for error messages.

    Raises:
        UserError: the text is not JSON, is nested too deeply, or has an object with a duplicate key.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno:,}, column {error.colno:,}" if "\n" in error.doc else f"column {error.colno:,}"
        raise UserError(f"{source} is not valid JSON: {error.msg} at {place}") from None
    except RecursionError:
        raise UserError(f"{source} is nested too deeply; simplify it") from None
    except ValueError as error:  # not UTF-8, a key that occurs twice, a number with too many digits
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
