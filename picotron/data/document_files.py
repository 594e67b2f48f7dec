"""Readers of data files: the texts or records of .txt, .jsonl, .json and .parquet files, in blocks of about 64 KiB.

A file can be larger than memory. So a `Block` only names a part of a file, and the process that tokenises the block
reads it.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from picotron.console import UserError, first_line
from picotron.files import parse_json, read_json

BLOCK_BYTES = 2**16
WINDOW = 2**14  # bytes or characters after the end of a block in which to look for a place to cut
CONTEXT = 2**8  # characters on each side of a cut that decide which tokens are next to it
ROWS = 100  # rows of a table that are read at a time
TOOLS = "tools"  # column, beside messages, with JSON schemas of the functions that the assistant may call

Columns = dict[str, str]  # columns of the data, by the config keys that name them
Convert = Callable[[Any], Iterator[Any]]  # turns a record, a dict, into any number of items


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
    """Text of a document, or a part of it if it is long.

    Args:
        ends_document: whether the document ends with it.
        before, after: up to CONTEXT characters of the document before and after the text.
    """

    text: str
    ends_document: bool
    before: str = ""
    after: str = ""

    @property
    def cuts(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The characters before and after the piece's beginning, and those before and after its end."""
        return (self.before, (self.text + self.after)[:CONTEXT]), ((self.before + self.text)[-CONTEXT:], self.after)


def _good_cut(window: str | bytes) -> int:
    """Position in a window at which to cut a text: before white space, where the tokens on one side hardly depend on
    the text on the other side; else at the first character.
    """
    pattern = r"\S(?=\s)"
    if match := re.search(pattern, window) if isinstance(window, str) else re.search(pattern.encode(), window):
        return match.end()
    if isinstance(window, str):
        return 0
    continuation = bytes(range(0x80, 0xC0))  # bytes of a UTF-8 character after its first one
    return len(window) - len(window.lstrip(continuation)) or int(window.startswith(b"\n"))  # not inside of \r\n


def cut(text: str) -> Iterator[Piece]:
    """Cut a document into pieces of the size of a block."""
    start, before = 0, ""
    while len(text) - start > BLOCK_BYTES + WINDOW:
        end = start + BLOCK_BYTES
        end += _good_cut(text[end : end + WINDOW])
        yield Piece(text[start:end], False, before, text[end : end + CONTEXT])
        start, before = end, text[max(0, end - CONTEXT) : end]
    yield Piece(text[start:], True, before)


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


def _text(path: Path, start: int, end: int, errors: str) -> str:
    """Text of a range of bytes of a text file, with "\\n" as the only line break."""
    text = _bytes(Block(path, start, end, 0)).decode("utf-8-sig" if start == 0 else "utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_text(block: Block, columns: Columns, convert: Convert, errors: str = "strict") -> Iterator[Piece]:
    """Read the pieces of a text, which has neither columns nor records to convert."""
    path, start, end, _ = block
    try:
        text = _text(path, start, end, errors)
    except UnicodeDecodeError as error:
        place = start + error.start
        raise UserError(f"{path} is not UTF-8 at byte {place:,} ({error.reason}); convert the file to UTF-8") from None
    reach = 4 * (CONTEXT + 1)  # bytes that have CONTEXT characters, even if the first character is incomplete
    before = _text(path, max(0, start - reach), start, "replace")[-CONTEXT:]
    after = _text(path, end, end + reach, "replace")[:CONTEXT]
    yield Piece(text, not after, before, after)


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


def text_of(record: Any, key: str, column: str) -> str | None:
    """Return the text of a record in the column that a config key names, or None if it is null.

    Raises:
        UserError: the record has no valid text in this column.
    """
    if not isinstance(record, dict):
        raise UserError(f"expected an object {{...}}, but found a {type(record).__name__}")
    text = record.get(column, 0)
    if text is not None and not isinstance(text, str):
        columns = [name for name, value in record.items() if isinstance(value, str)]
        raise UserError(f"dataset.{key}={column!r} has no text there; use one of {columns}")
    return None if text is None else check_characters(text)


def check_characters(text: str) -> str:
    """Return a text, or raise a UserError if it has surrogates, which cannot be encoded."""
    if re.search("[\ud800-\udfff]", text):
        raise UserError("the text has an unpaired surrogate (\\ud800 to \\udfff), which is not a character; remove it")
    return text


def pieces_of(record: Any, columns: Columns) -> Iterator[Piece]:
    """Yield the pieces of a record's texts."""
    for key, column in columns.items():
        text = text_of(record, key, column)
        if text is not None:
            yield from cut(text)


def convert_records(records: Iterable[Any], convert: Convert, place: Callable[[int], str]) -> Iterator[Any]:
    """Convert records. An error begins with `place(i)` if it is about record i."""
    for i, record in enumerate(records):
        try:
            yield from convert(record)
        except UserError as error:
            raise UserError(f"{place(i)}: {error}") from None


def _read_lines(block: Block, columns: Columns, convert: Convert) -> Iterator[Any]:
    def convert_line(line: bytes) -> Iterator[Any]:
        if line.strip():
            yield from convert(parse_json(line, "the record"))

    def place(i: int) -> str:
        starts = range(0, block.start, BLOCK_BYTES)
        before = (Block(block.path, start, min(start + BLOCK_BYTES, block.start), 0) for start in starts)
        line = i + 1 + sum(_bytes(each).count(b"\n") for each in before)
        return f"{block.path}, line {line:,}"

    return convert_records(_bytes(block).split(b"\n"), convert_line, place)


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


def _read_json(block: Block, columns: Columns, convert: Convert) -> Iterator[Any]:
    records = _records(block.path)
    if records is None:
        return _read_lines(block, columns, convert)
    return convert_records(records[: block.end], convert, lambda i: f"{block.path}, record {i + 1:,}")


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


def check_columns(columns: Columns, texts: list[str], others: list[str], source: str) -> list[str]:
    """Return the columns to read of a table: those of the config and, beside messages, the tools.

    Raises:
        UserError: the table does not have the columns: messages of any type, all others as text.
    """
    for key, column in columns.items():
        if key != "messages_column" and column not in texts:
            raise UserError(f"dataset.{key}={column!r}: {source} has no text there; use one of {texts}")
        if column not in texts + others:
            raise UserError(f"dataset.{key}={column!r}: {source} has no such column; use one of {others}")
    return [*columns.values(), *([TOOLS] if "messages_column" in columns and TOOLS in texts + others else [])]


def without_nulls(value: Any) -> Any:
    """Return a value of a table without keys that are null: in a table, every object has the keys of all objects in its
    column.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


class RowReader:
    """Rows of some columns of a parquet file, in ascending order.

    A parquet file can only be decoded from the beginning of a row group, which may hold the whole file. So a process
    keeps its latest reader, and continues with it if the next block comes later in the same file.
    """

    latest: ClassVar["RowReader | None"] = None

    def __init__(self, path: Path, columns: Columns) -> None:
        self.source, self.next, self.rows = (path, columns, os.getpid()), 0, self._rows(path, columns)

    @staticmethod
    def _rows(path: Path, columns: Columns) -> Iterator[dict[str, Any]]:
        with _parquet(path) as file:
            types = {field.name: str(field.type) for field in file.schema_arrow}
            texts = [name for name, kind in types.items() if kind in ("string", "large_string", "string_view")]
            names = check_columns(columns, texts, [name for name in types if name not in texts], str(path))
            for batch in file.iter_batches(ROWS, columns=names):
                rows = zip(*(batch.column(name) for name in names), strict=True)
                yield from (dict(zip(names, row, strict=True)) for row in rows)

    @classmethod
    def read(cls, block: Block, columns: Columns) -> Iterator[dict[str, Any]]:
        """Yield the rows of a block, whose values are scalars of arrow."""
        reader = cls.latest
        if reader is None or reader.source != (block.path, columns, os.getpid()) or reader.next > block.start:
            reader = cls.latest = RowReader(block.path, columns)
        for row in reader.rows:
            reader.next += 1
            if reader.next > block.start:
                yield row
            if reader.next == block.end:
                return


def _read_rows(block: Block, columns: Columns, convert: Convert) -> Iterator[Any]:
    def convert_row(row: dict[str, Any]) -> Iterator[Any]:
        try:
            record = {column: without_nulls(value.as_py()) for column, value in row.items()}
        except UnicodeDecodeError as error:
            raise UserError(f"the text is not UTF-8 ({error.reason})") from None
        yield from convert(record)

    return convert_records(
        RowReader.read(block, columns), convert_row, lambda i: f"{block.path}, row {block.start + i + 1:,}"
    )


READERS: dict[str, tuple[Callable[[Path, int], tuple[list[Block], int]], Callable[..., Iterator[Any]]]] = {
    ".py": (_text_blocks, functools.partial(_read_text, errors="replace")),
    ".txt": (_text_blocks, _read_text),
    ".jsonl": (_line_blocks, _read_lines),
    ".json": (_json_blocks, _read_json),
    ".parquet": (_row_blocks, _read_rows),
}
