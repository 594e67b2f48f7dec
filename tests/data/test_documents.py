"""Documents of a data set: which files it has, and their blocks and pieces."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from picotron.config import Dataset
from picotron.console import UserError
from picotron.data import document_files
from picotron.data.document_files import BLOCK_BYTES, WINDOW, Piece, cut
from picotron.data.documents import Documents, load_documents
from picotron.data.tokens import train_bpe


def documents_of(path: Path | str, limit: int | None = None, **keys: str) -> Documents:
    return load_documents(Dataset(name=str(path), **keys), limit)


def pieces_of(documents: Documents) -> Iterator[Piece]:
    return (piece for block in documents.blocks for piece in documents.read(block))


def texts(documents: Documents) -> Iterator[str]:
    """Yield the documents, joined from their pieces."""
    text = ""
    for piece in pieces_of(documents):
        text += piece.text
        if piece.ends_document:
            yield text
            text = ""
    assert text == ""


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return train_bpe(iter(["def f(x):\n    return x + 1\n\n\nclass A: pass\n" * 9]), 300)


LONG = {
    "code": "def f(x):\n    if x:\n        return 'a b  c'\n\n\n" * 9_000,
    "prose on one line": "the quick brown fox, it jumps. " * 9_000,
    "indented": "  deep\n    deeper\n" * 9_000,
    "one word": "x" * 300_000,
    "wide characters": "日本語テキスト" * 40_000,
    "emoji": "🙂" * 200_000,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_pieces_of_a_long_document_are_bounded_and_complete(tmp_path: Path, name: str, kind: str) -> None:
    text, file = LONG[name], tmp_path / f"a.{kind}"
    file.write_text(text if kind == "txt" else json.dumps({"text": text}))
    documents = documents_of(file)
    assert list(texts(documents)) == [text]
    assert max(len(piece.text) for piece in pieces_of(documents)) <= BLOCK_BYTES + WINDOW
    assert len(list(pieces_of(documents))) > 2
    if kind == "txt":
        assert max(block.end - block.start for block in documents.blocks) <= BLOCK_BYTES + WINDOW


@pytest.mark.parametrize("name", ["code", "prose on one line", "indented"])
def test_pieces_have_the_tokens_of_the_document(tmp_path: Path, name: str, bpe: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_text(LONG[name])
    pieces = [piece.text for piece in pieces_of(documents_of(tmp_path / "a.txt"))]
    assert list(itertools.chain(*bpe(pieces)["input_ids"])) == bpe(LONG[name])["input_ids"]


@example(text="\r\n\n", size=1)
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab \n\t\r é日🙂", max_size=200), size=st.integers(1, 40))
def test_any_text_survives_blocks_of_any_size(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_files, "BLOCK_BYTES", size)
        patch.setattr(document_files, "WINDOW", 8)
        assert "".join(piece.text for piece in cut(text)) == text
        (folder / "a.txt").write_text(text, newline="")
        (folder / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in (text, "end")))
        expected = text.replace("\r\n", "\n").replace("\r", "\n")
        assert "".join(piece.text for piece in pieces_of(documents_of(folder / "a.txt"))) == expected
        assert list(texts(documents_of(folder / "b.jsonl"))) == [text, "end"]


def test_a_folder_has_the_files_of_one_type_in_sorted_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (
        "train.txt",
        "a.txt",
        "test.txt",
        "deep/b.txt",
        ".hidden.txt",
        ".git/c.txt",
        "a.log",
        "a.txt~",
        "x.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "linked").symlink_to(tmp_path / "deep")
    with caplog.at_level("INFO", "picotron"):
        assert list(texts(documents_of(tmp_path))) == ["a.txt", "deep/b.txt", "test.txt", "train.txt"]
    assert caplog.messages == [f"{tmp_path}: 4 .txt files, 32 bytes; ignored: 3 other files, 1 linked folders"]


def test_a_folder_with_several_types_is_rejected(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        UserError, match=r"it has 1 \.txt and 2 \.jsonl; name a file, or a folder with files of one type"
    ):
        documents_of(tmp_path)


def test_a_folder_without_data_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("text")
    with pytest.raises(UserError, match="but it has none"):
        documents_of(tmp_path)


@pytest.mark.parametrize("kind", ["array", "lines"])
def test_json_files_hold_an_array_or_a_record_per_line(tmp_path: Path, kind: str) -> None:
    records = [{"text": text} for text in ("a", None, "b", "c")]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.json").write_text(json.dumps(records) if kind == "array" else lines)
    assert list(texts(documents_of(tmp_path / "a.json"))) == ["a", "b", "c"]
    assert list(texts(documents_of(tmp_path / "a.json", 3))) == ["a", "b"]


def test_blocks_of_parquet_files_can_be_read_in_any_order(tmp_path: Path) -> None:
    rows = [f"row {i} {'x' * 1_000}" for i in range(1_000)]
    pandas.DataFrame({"n": range(1_000), "text": rows}).to_parquet(
        tmp_path / "a.parquet", row_group_size=300, compression=None, use_dictionary=False
    )
    documents = documents_of(tmp_path / "a.parquet")
    assert len(documents.blocks) > 12
    assert {300, 600, 900} < {block.start for block in documents.blocks}  # of the row groups
    assert max(block.size for block in documents.blocks) <= BLOCK_BYTES
    assert list(texts(documents)) == rows
    assert list(texts(documents_of(tmp_path / "a.parquet", 437))) == rows[:437]
    order = [3, 4, 9, 9, 2, 12, 0]
    expected = [rows[i] for n in order for i in range(documents.blocks[n].start, documents.blocks[n].end)]
    assert [piece.text for n in order for piece in documents.read(documents.blocks[n])] == expected


def test_bad_rows_of_parquet_files_are_reported_with_their_number(tmp_path: Path) -> None:
    text = pyarrow.array([b"a", b"b", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 3: the text is not UTF-8 \(invalid start byte\)"):
        list(pieces_of(documents_of(tmp_path / "a.parquet")))


def test_blocks_are_only_found_when_they_are_needed(tmp_path: Path) -> None:
    """A start with cached tokens needs only the names, sizes and times of the files."""
    (tmp_path / "a.json").write_text("[1")
    documents = documents_of(tmp_path / "a.json")
    with pytest.raises(UserError, match="not valid JSON"):
        _ = documents.blocks


def test_a_changed_file_has_another_key(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abc")
    keys = [documents_of(file).key, documents_of(file, 1).key, documents_of(file, text_column="body").key]
    file.write_text("abcd")
    keys.append(documents_of(file).key)
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", r"a\.txt is not UTF-8 at byte 3 \(invalid start byte\); convert the file to UTF-8"),
        ("a.txt", b"a" * 70_000 + b" \x80" + b"b" * 20_000, r"a\.txt is not UTF-8 at byte 70,001"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": }\n',
            r"a\.jsonl, line 3: the record is not valid JSON: Expecting value at column 10",
        ),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a\.jsonl, line 2: expected an object \{\.\.\.\}, but found a list"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": 1}\n',
            r"a\.jsonl, line 2: dataset\.text_column='text' has no text there",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"line 2: .*; use one of \['body'\]"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: the text has an unpaired surrogate"),
        (
            "a.jsonl",
            b'{"text": "\xff"}\n',
            r"line 1: the record is not valid JSON: 'utf-8' codec can't decode byte 0xff",
        ),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: the record is nested too deeply"),
        ("a.jsonl", b"\n" * 70_000 + b"{", r"line 70,001: the record .* at column 2"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', r"line 1: .*the key 'text' occurs twice"),
        ("a.json", b'[{"text": "a"}, {"n": 1}]', r"a\.json, record 2: dataset\.text_column='text' has no text there"),
        ("a.json", b"[1", r"a\.json is not valid JSON: Expecting ',' delimiter"),
        ("a.parquet", b"PAR1 nothing", r"a\.parquet is not a valid parquet file"),
        ("a.parquet", b"", r"a\.parquet is not a valid parquet file"),
    ],
)
def test_bad_data_are_reported_with_their_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(pieces_of(documents_of(tmp_path / name)))


def test_a_parquet_file_without_the_column_is_rejected(tmp_path: Path) -> None:
    pandas.DataFrame({"n": [1], "body": ["a"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"text_column='text': .*a\.parquet has no text there; use one of \['body'\]"):
        list(pieces_of(documents_of(tmp_path / "a.parquet")))


def test_rows_of_a_hub_data_set_that_cannot_be_read_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a"] * 150, "n": list(range(150))})
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows)
    monkeypatch.setattr("picotron.data.documents.connect", lambda name: None)
    documents = documents_of("somebody/data")
    assert list(texts(documents)) == ["a"] * 150

    def fail(self: datasets.Dataset, key: slice) -> None:
        raise OSError("the file is damaged")

    monkeypatch.setattr(datasets.Dataset, "__getitem__", fail)
    with pytest.raises(UserError, match=r"rows 101 to 150 of somebody/data cannot be read \(the file is damaged\)"):
        list(documents.read(documents.blocks[1]))
