"""Documents of a data set: which files it has, or which rows of a data set on the hub."""

import contextlib
import functools
import hashlib
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron.config import Dataset as DatasetSection
from picotron.console import UserError, first_line
from picotron.data.document_files import (
    BLOCK_BYTES,
    READERS,
    ROWS,
    Block,
    Columns,
    Convert,
    check_columns,
    convert_records,
    pieces_of,
    without_nulls,
)
from picotron.model.hub import connect

logger = logging.getLogger("picotron")

FILE_TYPES = (".txt", ".jsonl", ".json", ".parquet")
PYTHON_STDLIB = "python-stdlib"


@dataclass(frozen=True)
class Documents:
    """A data set.

    Args:
        name: name in the config.
        key: string that changes with the data.
        columns: the columns to read.
        find_blocks: function that returns all blocks, in order.
        read_block: function that reads a block, and yields what a `Convert` makes of its records.
    """

    name: str
    key: str
    columns: Columns
    find_blocks: Callable[[], list[Block]]
    read_block: Callable[[Block, Convert], Iterator[Any]]

    def read(self, block: Block, convert: Convert | None = None) -> Iterator[Any]:
        """Yield what `convert` makes of the records of a block, by default the pieces of their texts."""
        return self.read_block(block, convert or functools.partial(pieces_of, columns=self.columns))

    @functools.cached_property
    def blocks(self) -> list[Block]:
        """All blocks. They are only found when they are needed, because all lines of .jsonl files are read for this."""
        return self.find_blocks()


def load_documents(section: DatasetSection, limit: int | None = None) -> Documents:
    """Find the documents of a data set: all, or the first `limit` of them.

    Raises:
        UserError: the data set does not exist or cannot be read.
    """
    name, path = section.name, Path(section.name)
    if name != PYTHON_STDLIB and not path.exists():
        if path.suffix in FILE_TYPES or path.is_absolute() or name.startswith("."):
            raise UserError(f"dataset.name={name!r}: there is no such file or folder; check the path")
        return _hub_documents(section, limit)
    if section.subset_name is not None:
        raise UserError(f"dataset.subset_name={section.subset_name!r}, but {name} has no subsets; remove it")
    if section.split != "train":
        raise UserError(
            f"dataset.split={section.split!r}, but {name} has only the split 'train'; remove it (training.num_samples "
            f"selects the first documents)"
        )
    files, kind = (python_stdlib(), ".py") if name == PYTHON_STDLIB else find_files(path)
    columns = section.columns
    if section.has_samples and kind in (".txt", ".py"):
        raise UserError(
            f"{' and '.join(f'dataset.{key}={column!r}' for key, column in columns.items())}, but {name} has no columns; "
            f"use .jsonl, .json or .parquet files"
        )
    blocks_of_file, read = READERS[kind]

    def find_blocks() -> list[Block]:
        blocks: list[Block] = []
        left = sys.maxsize if limit is None else limit
        with _user_error_on_failure(name):
            for file in files:
                new, count = blocks_of_file(file, left)
                blocks += new
                left -= count
                if left == 0:
                    break
        return blocks

    with _user_error_on_failure(name):
        state = [(os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((state, columns.get("text_column", columns), limit)).encode()).hexdigest()
    return Documents(name, key, columns, find_blocks, lambda block, convert: read(block, columns, convert))


@contextlib.contextmanager
def _user_error_on_failure(name: str) -> Iterator[None]:
    """Context in which a failure to read raises a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or name} cannot be read: {error.strerror}; check its permissions") from None


def find_files(path: Path) -> tuple[list[Path], str]:
    """List the files of a data set, a file or a folder, in sorted order. Hidden files and those of other types than
    FILE_TYPES are left out.

    Returns:
        The files, and their type.

    Raises:
        UserError: no file has a known type, or there are files of several types.
    """
    if not path.is_dir():
        if path.suffix not in FILE_TYPES:
            types = ", ".join(FILE_TYPES)
            raise UserError(f"dataset.name={str(path)!r} has file type {path.suffix!r}; use one of {types}")
        logger.info("%s: %s bytes", path, f"{path.stat().st_size:,}")
        return [path], path.suffix
    found: dict[str, list[Path]] = {}
    others, links = 0, 0
    for file in sorted(path.rglob("*")):
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if file.is_dir():
            links += file.is_symlink()
        elif file.is_file() and file.suffix in FILE_TYPES:
            found.setdefault(file.suffix, []).append(file)
        else:
            others += 1
    if len(found) != 1:
        counts = " and ".join(f"{len(files)} {kind}" for kind, files in found.items()) or "none"
        raise UserError(
            f"dataset.name={str(path)!r} should have files of one of the types {', '.join(FILE_TYPES)}, but it has "
            f"{counts}; name a file, or a folder with files of one type"
        )
    ((kind, files),) = found.items()
    size = sum(file.stat().st_size for file in files)
    ignored = f"; ignored: {others:,} other files, {links:,} linked folders" if others or links else ""
    logger.info("%s: %s %s files, %s bytes%s", path, f"{len(files):,}", kind, f"{size:,}", ignored)
    return files, kind


def python_stdlib() -> list[Path]:
    """List the source files of this Python's standard library in a fixed order: real text that every machine has.

    Excluded are tests, installed packages and tables (character sets, the help texts of pydoc).
    """
    excluded = {"site-packages", "dist-packages", "ensurepip", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    found: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - excluded  # os.walk does not enter the others
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _hub_documents(section: DatasetSection, limit: int | None) -> Documents:
    """Download a data set of the hub, unless it is in the cache of `datasets`."""
    connect(section.name)  # before the import, which reads whether to work offline
    import datasets  # imported here because it is slow, and only one process per machine needs it

    name, columns = section.name, section.columns
    try:
        rows = datasets.load_dataset(name, section.subset_name, split=section.split)
    except Exception as error:  # unknown on the hub, no network, unknown split, ...
        raise UserError(
            f"dataset.name={name!r} cannot be loaded ({first_line(error)}); use a hub id, a folder, a file or "
            f"{PYTHON_STDLIB!r}"
        ) from None
    types = {name: str(getattr(feature, "dtype", "nested")) for name, feature in rows.features.items()}
    texts = [name for name, kind in types.items() if kind in ("string", "large_string")]
    used = check_columns(columns, texts, [name for name in types if name not in texts], name)
    rows = rows.select_columns(used)  # others, such as images, would be decoded
    count = len(rows) if limit is None else min(limit, len(rows))

    def read(block: Block, convert: Convert) -> Iterator[Any]:
        try:
            table = rows[block.start : block.end]
        except Exception as error:  # of arrow or of its files
            raise UserError(
                f"rows {block.start + 1:,} to {block.end:,} of {name} cannot be read ({first_line(error)})"
            ) from None
        rows_of_block = (dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True))
        records = ({column: without_nulls(value) for column, value in row.items()} for row in rows_of_block)
        return convert_records(records, convert, lambda i: f"row {block.start + i + 1:,} of {name}")

    size = int(ROWS * (rows.dataset_size or 0) / max(1, len(rows))) or BLOCK_BYTES
    starts = range(0, count, ROWS)
    blocks = [Block(Path(name), start, min(start + ROWS, count), size) for start in starts]
    key = f"{rows._fingerprint} {columns.get('text_column', columns)} {count}"
    return Documents(name, key, columns, lambda: blocks, read)
