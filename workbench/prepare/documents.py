"""Documents of data sets: files, Python's standard library, data sets of the Hugging Face Hub, and mixtures of them."""

import bz2
import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import logging
import lzma
import os
import random
import sys
import sysconfig
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from picotron.config import Dataset as DatasetSection
from picotron.console import UserError
from workbench.console import first_line
from workbench.files import parse_json
from workbench.prepare.text import Columns, cut
from workbench.run.hub import connect, is_reachable

logger = logging.getLogger("picotron")

PYTHON_STDLIB = "python-stdlib"
ROWS = 100  # rows of a table that are read at a time
TOOLS = "tools"  # column, beside messages, with JSON schemas of the functions that the assistant may call
SYSTEM = "system"  # column, beside messages, with a system prompt, as ShareGPT has it
WEIGHT = "weight"  # column, beside messages, with 0 for conversations that do not count
REST = ("input", "history", SYSTEM)  # columns, beside prompts, with more of the prompt in Alpaca's format
BESIDE = {"messages_column": (SYSTEM, TOOLS, WEIGHT), "prompt_column": (TOOLS, *REST)}  # columns that are read, too


class Record(NamedTuple):
    """A document, a sample for fine-tuning, or a piece of a text file.

    Args:
        place: its file and line or row, for error messages.
        value: a dict, JSON that is not parsed yet, or a `Piece`.
        size: approximate number of bytes.
    """

    place: str
    value: Any
    size: int


class Documents(NamedTuple):
    """A data set.

    Args:
        name: its name in the config.
        key: string that changes with the data.
        size: approximate number of bytes, or None.
        read: function that yields the records of each document.
    """

    name: str
    key: str
    size: int | None
    read: Callable[[], Iterator[Iterable[Record]]]

    def records(self) -> Iterator[Record]:
        return itertools.chain.from_iterable(self.read())


def load_documents(section: DatasetSection, limit: int | None, seed: int, columns: Columns | None = None) -> Documents:
    """Find the documents of a data set, or of a mixture.

    Args:
        limit: number of documents to read, from the first one; None: all.
        seed: seed of the order of a mixture.
        columns: columns to read of a table, by their keys; by default those of the section. {}: all columns.

    Raises:
        UserError: a data set does not exist or cannot be read.
    """
    weights, columns = section.weights, section.columns if columns is None else columns
    parts = [_load(name, section, columns, limit) for name in weights]
    mixture = (weights, seed) if len(parts) > 1 else None
    key = repr(([part.key for part in parts], columns, limit, mixture))

    def read() -> Iterator[Iterable[Record]]:
        streams = {part.name: part.read() for part in parts}
        return itertools.islice(mix(streams, weights, seed) if mixture else streams[section.name], limit)

    size = parts[0].size if mixture is None and limit is None else None
    return Documents(" and ".join(weights), hashlib.sha256(key.encode()).hexdigest(), size, read)


def mix(streams: dict[str, Iterator[Any]], weights: dict[str, float], seed: int) -> Iterator[Any]:
    """Draw each document from one of several streams, with probabilities in the ratio of the weights, until the stream
    that is drawn has no more: the strategy "first_exhausted" of `datasets.interleave_datasets`.
    """
    generator, counts = random.Random(seed), dict.fromkeys(weights, 0)
    while True:
        (name,) = generator.choices([*weights], [*weights.values()])
        document = next(streams[name], None)
        if document is None:
            read = " and ".join(f"{count:,} documents of {name}" for name, count in counts.items())
            logger.info("the mixture ends where %s does, after %s", name, read)
            return
        counts[name] += 1
        yield document


def _load(name: str, section: DatasetSection, columns: Columns, limit: int | None) -> Documents:
    if name != PYTHON_STDLIB and not (os.path.exists(name) or glob.glob(name, recursive=True)):
        if _type(Path(name)) in READERS or Path(name).is_absolute() or name.startswith(".") or glob.has_magic(name):
            raise UserError(f"dataset {name!r}: there is no such file or folder; check the path")
        return _hub_documents(name, section, columns, limit)
    files = files_of(name, section, section.split)
    evaluated: list[Path] = []
    if section.eval_name and section.eval_name not in section.weights and os.path.exists(section.eval_name):
        evaluated = files_of(section.eval_name, section, section.eval_split or section.split, logs=False)
    if shared := {*files} & {*evaluated}:
        raise UserError(
            f"dataset.eval_name={section.eval_name!r} has {len(shared)} files that dataset.name={name!r} has, too, such as "
            f"{min(shared)}; name different files for training and evaluation"
        )
    read = READERS.get(_type(files[0]), _read_text)
    if (
        read is _read_text
        and section.columns != {"text_column": "text"}
        and (section.has_samples or not section.mixture)
    ):
        given = " and ".join(f"dataset.{key}={column!r}" for key, column in section.columns.items())
        raise UserError(f"{given}, but {name} has no columns; use .jsonl, .json, .csv or .parquet files")
    with _user_errors(name):
        state = [(os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    size = None if any(map(_compression, files)) else sum(size for _, size, _ in state)
    return Documents(name, repr(state), size, lambda: itertools.chain.from_iterable(read(f, columns) for f in files))


# --------------------------------------------------------------------------------------------------------------- files


def _compression(path: Path) -> str:
    """Return the suffix of a file if it names a compression, else ""."""
    return suffix if (suffix := path.suffix.lower()) in COMPRESSIONS else ""


def _type(path: Path) -> str:
    """Return the suffix of a file, in lower case, without one that names a compression."""
    return Path(path.stem if _compression(path) else path).suffix.lower()


def files_of(name: str, section: DatasetSection, split: str, logs: bool = True) -> list[Path]:
    """List the files of a split of a data set on this machine.

    Raises:
        UserError: it has no such split or subset; see also `find_files`.
    """
    if any(Path(name, each).exists() for each in ("dataset_dict.json", "dataset_info.json")):
        raise UserError(f"{name} was written by save_to_disk of `datasets`; write files with its to_parquet instead")
    splits = splits_of(name, section.subset_name) if os.path.isdir(name) else {}
    if split not in (splits or {"train"}) or (section.subset_name and not splits):
        key = f"dataset.subset_name={section.subset_name!r}" if section.subset_name else f"dataset.split={split!r}"
        raise UserError(
            f"{key}, but {name} has only {' and '.join(map(repr, splits)) or repr('train')}; change the key, or name "
            f"a pattern of files (training.num_samples selects the first documents)"
        )
    return python_stdlib() if name == PYTHON_STDLIB else find_files(name, splits.get(split), logs)


def splits_of(folder: str, subset: str | None) -> dict[str, set[Path]]:
    """Return the files of each split of a folder, by names or by its README.md, as `datasets.load_dataset` finds them;
    {} if that reads no file there.

    Raises:
        UserError: the folder has several subsets, and this is none of them; or `datasets` cannot read the folder.
    """
    from datasets import load_dataset_builder
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each README.md without metadata
    path = os.path.abspath(folder)
    try:
        with tempfile.TemporaryDirectory() as cache:  # HF_HOME may be read-only
            found = load_dataset_builder(path, subset, cache_dir=cache).config.data_files or {}
    except (EmptyDatasetError, DataFilesNotFoundError, RuntimeError):
        if "[" not in path and "::" not in path:
            return {}  # no type of file that it knows, or a script; find_files has a sentence
        raise UserError(
            f"{folder}: `datasets` takes [ and :: in a path for patterns; rename the folder, or name its files"
        ) from None
    except Exception as error:  # of many types
        raise UserError(f"{folder}: {' '.join(str(error).split())}; set dataset.subset_name, or name files") from None
    splits = {str(split): {Path(file).resolve() for file in files} for split, files in found.items()}
    types = {_type(file) for files in splits.values() for file in files}
    return splits if len(splits) > 1 or types <= READERS.keys() else {}  # not if all are such as .md


def find_files(name: str, wanted: Container[Path] | None, logs: bool) -> list[Path]:
    """List the files that a path or a pattern stands for, and those in folders, in sorted order. Hidden files and those
    of unknown types are left out, and so are text files if there are others; a text file that is named itself may have
    any suffix.

    Args:
        wanted: the files to list, of those in a folder; None: all.
        logs: whether to log their number and size.

    Raises:
        UserError: no file has a known type, or there are files of several types.
    """
    found: set[Path] = set()
    named = [Path(name)] if os.path.exists(name) else [*map(Path, glob.glob(name, recursive=True))]
    for path in named:
        inside = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
        found |= {*inside} if path.is_dir() else {path}
    readable = sorted(path for path in found if path.is_file())
    files = [path for path in readable if _type(path) in READERS]
    if not files:
        files = [path for path in readable if _type(path) in TEXTS or (path in named and _is_text(path))]
    counts = Counter(map(_type, files))
    if len(counts) != 1:
        has = " and ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
        raise UserError(
            f"dataset.name={name!r} should have files of one of the types {', '.join(READERS)}, or text such as .md, but it has {has}; name a "
            f"file, a pattern or a folder with files of one type"
        )
    unpacked = Counter(path.with_suffix("") if _compression(path) else path for path in files)
    if twice := next((path for path, count in unpacked.items() if count > 1), None):
        raise UserError(f"{name} has {twice.name} more than once, compressed and not; remove one of the files")
    every, files = files, [path for path in files if wanted is None or path.resolve() in wanted]
    if not files:
        raise UserError(f"{name}: this split has files of another type than {every[0].name}; name a pattern of files")
    links = sum(path.is_dir() and path.is_symlink() for path in found)
    others = sum(not path.is_dir() for path in found) - len(files)
    kind = "" if files == [Path(name)] else f"{len(files):,} {_type(files[0])} files, "
    ignored = f"; ignored: {others:,} other files, {links:,} linked folders" if others or links else ""
    if logs:
        logger.info("%s: %s%s bytes%s", name, kind, f"{sum(file.stat().st_size for file in files):,}", ignored)
    return files


def _is_text(path: Path) -> bool:
    with _opened(path) as file:
        return b"\0" not in file.read(ROWS)


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


@contextlib.contextmanager
def _user_errors(name: Path | str) -> Iterator[None]:
    """Context in which a failure to read a file raises a UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error.reason}); convert the file to UTF-8") from None
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if not isinstance(error, OSError) or error.errno is None:  # not of the file system
            raise UserError(
                f"{name} cannot be decompressed: {first_line(error)}; check it with its own program, or unpack it first (if it is "
                f"a .zst file with a long window, by zstd -d --long=31)"
            ) from None
        raise UserError(
            f"{error.filename or name} cannot be read: {first_line(error)}; check the file and its permissions"
        ) from None


def _zstd(path: Path) -> io.BufferedReader:
    import pyarrow

    stream: Any = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream)


COMPRESSIONS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file, which may be compressed."""
    with _user_errors(path), COMPRESSIONS.get(_compression(path), functools.partial(open, mode="rb"))(path) as file:
        yield file


def _read_text(path: Path, _: Columns) -> Iterator[Iterator[Record]]:
    """A text file is a document."""

    def pieces() -> Iterator[Record]:
        with _opened(path) as file:
            errors = "replace" if path.suffix == ".py" else "strict"
            for piece in cut(io.TextIOWrapper(file, "utf-8-sig", errors)):
                yield Record(str(path), piece, len(piece.text))

    yield pieces()


def _read_lines(path: Path, _: Columns) -> Iterator[list[Record]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if (line := line.rstrip()) == b"{":
                raise UserError(
                    f"{path}: a record has several lines; write one record per line, or an array in a .json file"
                )
            if line:
                yield [Record(f"{path}, line {number:,}", line, len(line))]


def _read_json(path: Path, columns: Columns) -> Iterator[list[Record]]:
    """A .json file holds an array, which is read as a whole, or a record per line."""
    with _opened(path) as file:
        if not file.peek().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _read_lines(path, columns)
            return
        content = file.read()
    records = parse_json(content, str(path))
    for number, record in enumerate(records, 1):
        yield [Record(f"{path}, record {number:,}", record, len(content) // len(records))]


def _read_csv(path: Path, _: Columns, delimiter: str = ",") -> Iterator[list[Record]]:
    """All values of a .csv file are text: 007 is not 7."""
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file:
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        try:
            check_names(rows.fieldnames or (), path)
            for row in rows:
                place = f"{path}, line {rows.line_num:,}"
                if None in row or None in row.values():
                    raise UserError(f"{place}: the row should have {len(rows.fieldnames or ())} values; correct it")
                yield [Record(place, row, sum(map(len, row.values())))]
        except csv.Error as error:
            raise UserError(
                f"{path}, after line {rows.line_num:,}: the row is not valid CSV: {error}; correct it"
            ) from None


def _read_parquet(path: Path, columns: Columns) -> Iterator[list[Record]]:
    import pyarrow
    import pyarrow.parquet

    with _opened(path) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is not a valid parquet file: {first_line(error)}; check it") from None
        check_names(table.schema_arrow.names, path)
        names = columns_of(columns, table.schema_arrow.names, str(path))
        batches = table.iter_batches(ROWS, columns=names)
        rows = (row for batch in batches for row in zip(*batch.columns, strict=True))
        records = (
            {name: value.as_py(maps_as_pydicts="strict") for name, value in zip(names, row, strict=True)}
            for row in rows
        )
        yield from _read_rows(records, str(path), path.stat().st_size // max(1, table.metadata.num_rows))


TEXTS = {".md", ".rst", ".html", ".htm", ".tex", ".py"}  # suffixes of files in folders that are read as they are
READERS: dict[str, Callable[[Path, Columns], Iterator[Iterable[Record]]]] = {
    ".txt": _read_text,
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": functools.partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
}


# -------------------------------------------------------------------------------------------------------------- tables


def check_names(names: Iterable[str], path: Path) -> None:
    """Raise a UserError if two columns of a file have the same name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{path}: two columns have the name {twice[0]!r}; rename one of them")


def columns_of(columns: Columns, names: list[str], source: str) -> list[str]:
    """Return the columns to read of a table: those of the config, and those of BESIDE. Without any, all.

    Args:
        names: names of all columns.

    Raises:
        UserError: the table does not have a column of the config.
    """
    for key, column in columns.items():
        if column not in names:
            raise UserError(f"dataset.{key}={column!r}: {source} has no such column; use one of {names}")
    beside = [name for key in columns for name in BESIDE.get(key, ()) if name in names]
    return [*dict.fromkeys([*columns.values(), *beside])] or names


def _read_rows(rows: Iterable[dict[str, Any]], source: str, size: int) -> Iterator[list[Record]]:
    """Yield a record for each row of a table, without keys of objects that are null: in a table, every object has the
    keys of all objects in its column.
    """

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(each) for key, each in value.items() if each is not None}
        return [without_nulls(each) for each in value] if isinstance(value, list) else value

    number = 0
    try:
        for number, row in enumerate(rows, 1):
            record = {name: without_nulls(value) for name, value in row.items()}
            yield [Record(f"{source}, row {number:,}", record, size)]
    except Exception as error:  # of arrow or its files, text that is not UTF-8, ...
        raise UserError(
            f"{source}, row {number + 1:,} cannot be read ({first_line(error)}); correct the file"
        ) from None


def _hub_documents(name: str, section: DatasetSection, columns: Columns, limit: int | None) -> Documents:
    """Read a data set of the hub: its first `limit` rows as a stream; without a limit, all, after a download."""
    try:
        connect(name)  # before the import, which reads whether to work offline
        import datasets  # imported here because it is slow, and only one process per machine needs it

        rows: Any
        if limit is not None and is_reachable():
            builder = datasets.load_dataset_builder(name, section.subset_name)
            rows, size = builder.as_streaming_dataset(section.split)._resolve_features().take(limit), 0
            key = repr((name, builder.hash, section.subset_name, section.split))
        else:
            rows = datasets.load_dataset(name, section.subset_name, split=section.split)
            key, size = rows._fingerprint, rows.dataset_size or 0
    except Exception as error:  # unknown on the hub, no network, unknown split, ...
        raise UserError(
            f"dataset.name={name!r} cannot be loaded ({first_line(error)}); use a hub id, a folder, a file or "
            f"{PYTHON_STDLIB!r}"
        ) from None
    rows = rows.select_columns(columns_of(columns, [*rows.features], name))  # others, such as images, would be decoded
    per_row = size // max(1, len(rows)) if size else 0
    return Documents(name, key, size or None, lambda: _read_rows(rows, name, per_row))
