"""Readers of data files: the texts of .txt, .jsonl, .json and .parquet files, in blocks of about 64 KiB.

A file can be larger than memory. So a `Block` only names a part of a file, and the process that tokenises the block
reads it.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from picotron.errors import UserError, first_line
from picotron.json_files import parse_json, read_json

BLOCK_BYTES = 2**16
WINDOW = 2**14  # bytes or characters after the end of a block in which to look for a place to cut
ROWS = 100  # rows of a table that are read at a time


class Block(NamedTuple):
    """Part of a data set.

    Args:
        path: its file; for a data set of the hub, the name of the data set.
        start, end: range of bytes of a .txt or .jsonl file; for other types, range of records or rows.
        size: approximate number of bytes, for progress bars.
    """

    path: Path
    start: int
    end: int
    size: int


class Piece(NamedTuple):
    """Text of a document, or a part of it if it is long, and whether the document ends with it."""

    text: str
    ends_document: bool


def _good_cut(window: str | bytes) -> int:
    """Position in a window at which to cut a text, preferably one at which the pre-tokenizers of GPT-2 and Llama 3 cut
    as well, so that the tokens do not change: after a line break that no other white space precedes or follows; else
    before a single space; else before other white space; else at the first character.
    """
    for pattern in (r"\S\n(?=\S)", r"\S(?= \S)", r"\S(?=\s)"):
        match = re.search(pattern, window) if isinstance(window, str) else re.search(pattern.encode(), window)
        if match:
            return match.end()
    if isinstance(window, str):
        return 0
    continuation = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first one
    return len(window) - len(window.lstrip(continuation)) or int(window.startswith(b"\n"))  # not inside of \r\n


def cut(text: str) -> Iterator[Piece]:
    """Cut a document into pieces of the size of a block."""
    start = 0
    while len(text) - start > BLOCK_BYTES + WINDOW:
        end = start + BLOCK_BYTES
        end += _good_cut(text[end : end + WINDOW])
        yield Piece(text[start:end], False)
        start = end
    yield Piece(text[start:], True)


def _bytes(block: Block) -> bytes:
    try:
        with block.path.open("rb") as file:
            file.seek(block.start)
            return file.read(block.end - block.start)
    except OSError as error:
        raise UserError(f"{block.path} cannot be read: {error.strerror}") from None


def _text_blocks(path: Path, _: int) -> tuple[list[Block], int]:
    """Blocks of a text file, which is one document."""
    size, start, blocks = path.stat().st_size, 0, []
    with path.open("rb") as file:
        while start < size:
            end = start + BLOCK_BYTES
            if end + WINDOW < size:
                file.seek(end)
                end += _good_cut(file.read(WINDOW))
            else:
                end = size
            blocks.append(Block(path, start, end, end - start))
            start = end
    return blocks, 1


def _read_text(block: Block, column: str, errors: str = "strict") -> Iterator[Piece]:
    try:
        text = _bytes(block).decode("utf-8-sig" if block.start == 0 else "utf-8", errors)
    except UnicodeDecodeError as error:
        place = block.start + error.start
        raise UserError(
            f"{block.path} is not UTF-8 at byte {place:,} ({error.reason}); convert the file to UTF-8"
        ) from None
    yield Piece(text.replace("\r\n", "\n").replace("\r", "\n"), block.end == block.path.stat().st_size)


def _line_blocks(path: Path, limit: int) -> tuple[list[Block], int]:
    """Blocks of a file with a record per line, and the number of records."""
    start, end, count, blocks = 0, 0, 0, []
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            count += not line.isspace()
            if end - start >= BLOCK_BYTES or count == limit:
                blocks.append(Block(path, start, end, end - start))
                start = end
            if count == limit:
                return blocks, count
    return [*blocks, Block(path, start, end, end - start)] if end > start else blocks, count


def _text_of(record: Any, column: str) -> str | None:
    """Return the text of a record, or None if it is null.

    Raises:
        UserError: the record has no valid text in this column.
    """
    if not isinstance(record, dict):
        raise UserError(f"expected an object {{...}}, but found a {type(record).__name__}")
    text = record.get(column, 0)
    if text is not None and not isinstance(text, str):
        columns = [name for name, value in record.items() if isinstance(value, str)]
        raise UserError(f"dataset.text_column={column!r} has no text there; use one of {columns}")
    if text and re.search("[\ud800-\udfff]", text):
        raise UserError("the text has an unpaired surrogate (\\ud800 to \\udfff), which is not a character; remove it")
    return text


def _read_lines(block: Block, column: str) -> Iterator[Piece]:
    for number, line in enumerate(_bytes(block).split(b"\n"), start=1):
        try:
            text = _text_of(parse_json(line, "the record"), column) if line.strip() else None
        except UserError as error:
            starts = range(0, block.start, BLOCK_BYTES)
            before = (Block(block.path, start, min(start + BLOCK_BYTES, block.start), 0) for start in starts)
            number += sum(_bytes(each).count(b"\n") for each in before)
            raise UserError(f"{block.path}, line {number:,}: {error}") from None
        if text is not None:
            yield from cut(text)


def _records(path: Path) -> list[Any] | None:
    """Read the records of a .json file that holds one JSON array. Returns None if it has a record per line instead."""
    with path.open("rb") as file:
        if not file.read(WINDOW).lstrip().startswith(b"["):
            return None
    records: list[Any] = read_json(path)
    return records


def _json_blocks(path: Path, limit: int) -> tuple[list[Block], int]:
    """A single block for a JSON array, which is read at once."""
    records = _records(path)
    if records is None:
        return _line_blocks(path, limit)
    count = min(limit, len(records))
    return [Block(path, 0, count, path.stat().st_size)], count


def _read_json(block: Block, column: str) -> Iterator[Piece]:
    records = _records(block.path)
    if records is None:
        yield from _read_lines(block, column)
        return
    for number, record in enumerate(records[: block.end], start=1):
        try:
            text = _text_of(record, column)
        except UserError as error:
            raise UserError(f"{block.path}, record {number:,}: {error}") from None
        if text is not None:
            yield from cut(text)


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Open a parquet file. Errors of its reader become UserErrors."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a valid parquet file: {first_line(error)}") from None


def _row_blocks(path: Path, limit: int) -> tuple[list[Block], int]:
    """Blocks of a parquet file, each in a single row group."""
    start, blocks = 0, []
    with _parquet(path) as file:
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            end = min(limit, start + group.num_rows)
            bytes_per_row = max(1, group.total_byte_size // max(1, group.num_rows))
            step = max(1, BLOCK_BYTES // bytes_per_row)
            for first in range(start, end, step):
                last = min(first + step, end)
                blocks.append(Block(path, first, last, (last - first) * bytes_per_row))
            start = end
    return blocks, start


class Rows:
    """Rows of a column of a parquet file, in ascending order.

    A parquet file can only be decoded from the beginning of a row group, which may hold the whole file. So a process
    keeps its latest reader, and continues with it if the next block comes later in the same file.
    """

    latest: ClassVar["Rows | None"] = None

    def __init__(self, path: Path, column: str) -> None:
        self.source, self.next, self.values = (path, column, os.getpid()), 0, self._values(path, column)

    @staticmethod
    def _values(path: Path, column: str) -> Iterator[Any]:
        with _parquet(path) as file:
            types = {field.name: str(field.type) for field in file.schema_arrow}
            text_columns = [name for name, kind in types.items() if kind in ("string", "large_string", "string_view")]
            if column not in text_columns:
                raise UserError(f"dataset.text_column={column!r}: {path} has no text there; use one of {text_columns}")
            for batch in file.iter_batches(ROWS, columns=[column]):
                yield from batch.column(0)

    @classmethod
    def read(cls, block: Block, column: str) -> Iterator[str | None]:
        """Yield the values of the rows of a block."""
        rows = cls.latest
        if rows is None or rows.source != (block.path, column, os.getpid()) or rows.next > block.start:
            rows = cls.latest = Rows(block.path, column)
        for value in rows.values:
            rows.next += 1
            if rows.next > block.start:
                yield value.as_py()
            if rows.next == block.end:
                return


def _read_rows(block: Block, column: str) -> Iterator[Piece]:
    values = Rows.read(block, column)
    for row in range(block.start, block.end):
        try:
            text = next(values)
        except UnicodeDecodeError as error:
            raise UserError(f"{block.path}, row {row + 1:,}: the text is not UTF-8 ({error.reason})") from None
        if text is not None:
            yield from cut(text)


READERS: dict[str, tuple[Callable[[Path, int], tuple[list[Block], int]], Callable[..., Iterator[Piece]]]] = {
    ".py": (_text_blocks, functools.partial(_read_text, errors="replace")),
    ".txt": (_text_blocks, _read_text),
    ".jsonl": (_line_blocks, _read_lines),
    ".json": (_json_blocks, _read_json),
    ".parquet": (_row_blocks, _read_rows),
}
