"""Documents of a data set: which files it has, their pieces, and mixtures."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from picotron.config import Dataset
from picotron.console import UserError
from workbench.prepare import text as text_module
from workbench.prepare.documents import READERS, ROWS, Documents, load_documents
from workbench.prepare.text import PIECE, Piece, cut
from workbench.prepare.tokens import convert


def documents_of(path: Path | str, limit: int | None = None, seed: int = 0, **keys: object) -> Documents:
    return load_documents(Dataset.model_validate({"name": str(path), **keys}), limit, seed)


def pieces_of(documents: Documents) -> Iterator[Piece]:
    for record in documents.records():
        yield from convert(record, lambda value: text_module.pieces_of(value, {"text_column": "text"}))


def texts(documents: Documents) -> Iterator[str]:
    """Yield the documents, joined from their pieces."""
    text = ""
    for piece in pieces_of(documents):
        text += piece.text
        if piece.ends_document:
            yield text
            text = ""
    assert text == ""


# -------------------------------------------------------------------------------------------------------------- pieces


@example(text="\r\n\n", size=1)
@settings(max_examples=100)
@given(text=st.text(alphabet="ab \n\t\r é日🙂", max_size=200), size=st.integers(1, 40))
def test_any_text_survives_pieces_of_any_size(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    file = tmp_path_factory.mktemp("any") / "a.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE", size)
        patch.setattr(text_module, "WINDOW", 8)
        assert "".join(piece.text for piece in cut(io.StringIO(text, newline=""))) == text
        file.write_text(text, newline="")
        assert list(texts(documents_of(file))) == [text.replace("\r\n", "\n").replace("\r", "\n")]


# --------------------------------------------------------------------------------------------------------------- files

FOLDER = "two.txt a.txt three.txt deep/b.txt .hidden.txt .git/c.txt a.log a.txt~ x.py"


def write(folder: Path, names: str) -> None:
    """Write files whose content is their name, or binary if this is .bin."""
    for name in names.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\0" if name.endswith(".bin") else name)


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        (FOLDER, ".", ["a.txt", "deep/b.txt", "three.txt", "two.txt"]),
        (FOLDER, "t*.txt", ["three.txt", "two.txt"]),
        (FOLDER, "x*.txt", r"/x\*\.txt': there is no such file"),
        ("a.md b/c.md", ".", ["a.md", "b/c.md"]),
        ("a.md b/c.md d.html", "*.html", ["d.html"]),
        ("a.md b/c.md d.html", ".", r"it has 1 \.html and 2 \.md; name a file"),
        # `load_dataset` reads the files of the type that most have
        *(
            (f"a.txt {others}", ".", ["a.txt"])
            for others in ("x.md y.md", "x.png y.png", "x.wav", "b.xml c.xml", "test.md")
        ),
        ("ls.1 a.bin", "*.1", ["ls.1"]),
        ("ls.1 a.bin", "ls.1", ["ls.1"]),
        ("ls.1 a.bin", ".", "it has none; name a file"),
        ("ls.1 a.bin", "a.bin", "it has none; name a file"),
        ("a.txt b.jsonl c.jsonl.gz", ".", r"it has 2 \.jsonl and 1 \.txt; name a file"),
        ("b.jsonl b.jsonl.gz", "b*", r"has b\.jsonl more than once"),
    ],
)
def test_a_name_stands_for_files_of_one_type(tmp_path: Path, files: str, name: str, expected: list[str] | str) -> None:
    write(tmp_path, files)
    if isinstance(expected, list):
        assert list(texts(documents_of(tmp_path / name))) == expected
    else:
        with pytest.raises(UserError, match=expected):
            documents_of(tmp_path / name)


def test_files_that_are_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, FOLDER)
    (tmp_path / "linked").symlink_to(tmp_path / "deep")
    caplog.set_level("INFO", "picotron")
    assert len(list(texts(documents_of(tmp_path)))) == 4
    assert caplog.messages == [f"{tmp_path}: 4 .txt files, 31 bytes; ignored: 3 other files, 1 linked folders"]


def test_tables_of_other_programs_are_read(tmp_path: Path) -> None:
    table = pandas.DataFrame({"text": pandas.Categorical(["a, b", "c", "a, b"]), "n": [1, 2, 3]})
    table.to_csv(tmp_path / "a.tsv", sep="\t")
    table.to_json(tmp_path / "a.ndjson", orient="records", lines=True)
    table.to_parquet(tmp_path / "a.parquet")
    for path in tmp_path.iterdir():
        assert list(texts(documents_of(path))) == ["a, b", "c", "a, b"]


def test_a_map_in_a_parquet_file_is_an_object(tmp_path: Path) -> None:
    column = pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    (path := tmp_path / "a.parquet").write_bytes(parquet(m=column))
    ((record,),) = READERS[".parquet"](path, {"text_column": "m"})
    assert record.value == {"m": {"a": 1}}


@pytest.mark.parametrize("limit", [1, 3, None])
def test_the_first_rows_of_a_hub_data_set_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """A folder stands for the hub."""
    folder, calls = tmp_path / "somebody", []
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f'{{"n": {i}, "text": "{i}"}}\n' for i in range(5)))
    load, build = datasets.load_dataset, datasets.load_dataset_builder
    monkeypatch.setattr(
        datasets, "load_dataset", lambda _, *rest, **keys: calls.append(True) or load(str(folder), **keys)
    )
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: build(str(folder)))
    for name in ("connect", "is_reachable"):
        monkeypatch.setattr(f"workbench.prepare.documents.{name}", lambda *_: True)
    assert list(texts(documents_of("somebody/data", limit))) == ["0", "1", "2", "3", "4"][:limit]
    assert calls == [True] * (limit is None)


CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: "data/a*"}
  - {split: held_out, path: "*.jsonl"}
---
"""


@pytest.mark.parametrize("seed", range(25))
def test_a_folder_has_the_splits_of_load_dataset(tmp_path: Path, seed: int) -> None:
    """Folders as on the hub: splits in names of files or folders, or in README.md, or none."""
    dice = random.Random(seed)
    words = ["train", "test", "validation", "valid", "dev", "eval", "a", "b", "training_notes", "contest"]
    patterns = ["{}.jsonl", "data/{}-00000-of-00001.jsonl", "{}/part.jsonl", "my_{}_set.jsonl", "data/a_{}.jsonl"]
    for word in dice.sample(words, dice.randint(1, 4)):
        path = tmp_path / "set" / dice.choice(patterns).format(word)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": str(path)}) + "\n")
    if dice.random() < 0.3:
        (tmp_path / "set" / "README.md").write_text(CARD)
    folder = str(tmp_path / "set")
    try:
        expected = datasets.load_dataset(folder, cache_dir=str(tmp_path / "cache"))
    except (ValueError, FileNotFoundError):  # a pattern of README.md without a file
        return
    for split in {*expected, "train", "test"}:
        if split not in expected:
            with pytest.raises(UserError, match="has only"):
                documents_of(folder, split=split)
        else:
            assert sorted(texts(documents_of(folder, split=split))) == sorted(expected[split]["text"])


def test_a_test_split_is_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are left out, or the folder is an error, whatever keeps `datasets` from finding the splits."""
    for name in ("set", "set [2]"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "train.txt test.txt")
    (tmp_path / "set/README.md").write_text("# no metadata")
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file/cache")  # cannot be written
    assert list(texts(documents_of(tmp_path / "set"))) == ["train.txt"]
    with pytest.raises(UserError, match="rename the folder"):
        documents_of(tmp_path / "set [2]")
    (tmp_path / "set/README.md").write_text("---\nconfigs: [{\n---\n")
    with pytest.raises(UserError, match=r"parsing a flow node.*; set dataset.subset_name, or name files"):
        documents_of(tmp_path / "set")


def test_files_are_not_both_trained_on_and_evaluated(tmp_path: Path) -> None:
    write(tmp_path, "a.txt b.txt")
    with pytest.raises(UserError, match="name different files for training and evaluation"):
        documents_of(tmp_path, eval_name=str(tmp_path / "b.txt"))


RECORDS = [{"text": text} for text in ("a", "é 日\n", "007", "x" * 70_000)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def parquet(**columns: Any) -> bytes:
    pyarrow.parquet.write_table(
        pyarrow.table([*columns.values()], [name.rstrip("_") for name in columns]), file := io.BytesIO()
    )
    return file.getvalue()


TORN = pyarrow.array([b"a"] * (ROWS + 1) + [b"\xff"], pyarrow.binary()).view(pyarrow.string())  # the last is not UTF-8


@pytest.mark.parametrize("kind", ["jsonl", "txt", "csv"])
def test_compressed_files_are_read(tmp_path: Path, kind: str) -> None:
    content = LINES if kind == "jsonl" else pandas.DataFrame(RECORDS).to_csv(index=False).encode()
    (tmp_path / f"0.{kind}").write_bytes(content)
    (tmp_path / f"1.{kind}.gz").write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:]) + b"\0" * 9)
    (tmp_path / f"2.{kind}.bz2").write_bytes(bz2.compress(content))
    (tmp_path / f"3.{kind}.ZST").write_bytes(pyarrow.compress(content, "zstd", asbytes=True))
    (tmp_path / f"4.{kind}.xz").write_bytes(lzma.compress(content))
    plain = list(texts(documents_of(tmp_path / f"0.{kind}")))
    assert plain == ([content.decode()] if kind == "txt" else [record["text"] for record in RECORDS])
    assert list(texts(documents_of(tmp_path))) == plain * 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt.gz",
            gzip.compress(b"\xef\xbb\xbf" + b"a" * 70_000 + b" \x80"),
            r"a\.txt\.gz is not UTF-8 \(invalid start",
        ),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": }\n', "line 3: the record is not valid JSON: .* at column 10"),
        ("a.jsonl", b'{"text": "a', "JSON: Unterminated string starting at column 10"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}\n', "line 2: .*text_column='text' has no text there, but the int 1"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1: the record is not UTF-8; convert the file"),
        ("a.json", b'{\n"text": "a"}', "a record has several lines"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], "a.jsonl.gz cannot be decompressed"),
        *((f"a.jsonl.{suffix}", LINES, f"{suffix} cannot be decompressed") for suffix in ("bz2", "zst", "xz")),
        ("a.jsonl", b"[" * 100_000, "line 1: the record is nested too deeply"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', "the key 'text' occurs twice"),
        ("a.json", b'[{"text": "a"}, {"n": 1}]', "record 2: dataset.text_column='text' has no text there"),
        ("a.csv", b'n,text\n1,"a\nb"\n2\n', "line 4: the row should have 2 values"),
        ("a.csv", b"text,text\n1,a\n", "two columns have the name 'text'"),
        ("a.parquet", parquet(text=["a"], text_=["b"]), "two columns have the name 'text'"),
        ("a.parquet", b"PAR1 nothing", "is not a valid parquet file"),
        ("a.parquet", parquet(text=[["a"]]), "row 1: dataset.text_column='text' has no text there, but the list"),
        ("a.parquet", parquet(n=[1], body=["a"]), r"text_column='text': .* no such column; use one of \['n', 'body'\]"),
        ("a.parquet", parquet(text=TORN), rf"a\.parquet, row {ROWS + 2:,} cannot be read \('utf-8' codec can't"),
    ],
)
def test_bad_data_are_reported_with_their_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(pieces_of(documents_of(tmp_path / name)))
    assert len(str(error.value).splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------ mixtures


def test_a_mixture_has_the_documents_of_each_part_in_order_and_in_the_ratio_of_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, count in (("a", 3_000), ("b", 9_000)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(count)))
    (tmp_path / "c.txt").write_text("c " * PIECE)
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.txt"))
    caplog.set_level("INFO", "picotron")
    mixed = list(texts(documents_of(a, mixture={b: 0.5})))
    counts = Counter(text[0] for text in mixed)
    assert caplog.messages[-1].startswith(f"the mixture ends where {a} does, after 3,000 documents")
    assert counts["a"] == 3_000  # it ends when the first part does
    assert 1_350 < counts["b"] < 1_650
    for name, count in counts.items():
        assert [text for text in mixed if text[0] == name] == [f"{name}{i}" for i in range(count)]
    same = [documents_of(a, mixture={a: 2, b: 1}), documents_of(a, mixture={b: 0.5})]
    assert [list(texts(each)) for each in same] == [mixed, mixed]
    other = documents_of(a, seed=1, mixture={b: 0.5})
    assert list(texts(other)) != mixed
    assert other.key != same[1].key
    assert list(texts(documents_of(a, 7, mixture={b: 0.5}))) == mixed[:7]
    long = [text for text in itertools.islice(texts(documents_of(a, mixture={c: 0.1})), 50) if text[0] == "c"]
    assert long == ["c " * PIECE]
