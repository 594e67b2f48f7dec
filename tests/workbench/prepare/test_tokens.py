"""Tokenising data sets: documents and tokenizers, streams of tokens, and rejected data sets."""

import bisect
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from picotron.config import Config
from picotron.console import UserError
from tests.fuzz.chat_templates import TEMPLATES
from tests.fuzz.tokenizer_kinds import KINDS, make_tokenizer
from tests.support.oracle import make_config, tiny_llama
from tests.support.program import run
from tests.support.samples import CHAT, PROMPTS, messages, with_template, write_jsonl
from workbench.prepare import text as text_module
from workbench.prepare.cache import cached
from workbench.prepare.documents import python_stdlib
from workbench.prepare.tokens import END_OF_TEXT, read_tokenizer, write_tokens

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "one line only, with ünïcödé → ok",
    "class A:\n\n    pass\n" * 30,
    "the end",
]


@pytest.fixture
def cache(tmp_path: Path, folder: str) -> Path:
    """The folder of the empty cache."""
    return tmp_path / "cache" / "picotron"


def load_tokens(config: Config, model_config: LlamaConfig) -> np.ndarray:
    """Tokenise the data set of a config, without a process group."""
    return np.memmap(write_tokens(config, model_config) / "tokens.uint16", np.uint16, "r")


def test_tokens_are_cached_until_the_content_the_columns_or_the_tokenizer_change(tmp_path: Path, folder: str) -> None:
    def entry(**keys: Any) -> Path:
        config = make_config(**{"dataset__name": str(tmp_path / "a.jsonl"), "model__tokenizer": folder} | keys)
        return write_tokens(config, tiny_llama(vocab_size=300))

    chat = messages([("user", "a"), ("assistant", "b")])
    write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "a": "b", "chat": chat}])
    folders = [shutil.copytree(folder, tmp_path / name) for name in ("ChatML", "Llama 3", "special")]
    for path in folders[:2]:
        with_template(path, TEMPLATES[path.name])
    PreTrainedTokenizerFast.from_pretrained(folder, split_special_tokens=True).save_pretrained(folders[2])
    changes = [
        PROMPTS,
        {"dataset__text_column": "a"},
        {"dataset__prompt_column": "a", "dataset__completion_column": "q"},
    ]
    changes += [CHAT | {"model__tokenizer": str(path)} for path in folders[:2]]
    changes += [{"dataset__text_column": "a", "model__tokenizer": str(folders[2])}]
    entries = [entry(**keys) for keys in changes]
    assert len({*entries}) == len(entries)
    assert [entry(**keys) for keys in changes] == entries
    write_jsonl(tmp_path / "a.jsonl", [{"q": "a", "a": "b", "chat": chat}, {"a": None}, {"a": ""}])
    assert entry(dataset__text_column="a") not in entries


def test_bpe_has_the_requested_size_and_decodes_losslessly(cache: Path) -> None:
    config = make_config(model__tokenizer="bpe", training__num_samples=30)
    tokens = load_tokens(config, tiny_llama(vocab_size=600))
    assert 500 < tokens.max() < 600
    (written,) = [p for p in cache.glob("bpe-*") if p.is_dir()]
    bpe = PreTrainedTokenizerFast.from_pretrained(written)
    assert len(bpe) == 600
    documents = bpe.decode(tokens.tolist()).split(END_OF_TEXT)
    texts = [file.read_text(encoding="utf-8") for file in python_stdlib()[:30]]
    assert documents[:-1] == [text for text in texts if text]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset__name": "./no/such/file.txt"}, "there is no such file or folder"),
        ({"dataset__name": "nobody/no-such-data"}, "cannot be loaded"),
        ({"dataset__name": "@/good.jsonl", "dataset__split": "nonsense"}, "has only 'train'"),
        ({"model__tokenizer": "@"}, "cannot load a tokenizer from"),
        ({"model__tokenizer": "@/tokenizer", "vocab_size": 61}, "has 300 tokens, but the model's vocab_size is 61"),
        # transformers reads every tokenizer beside a qwen2 model as a Qwen2Tokenizer
        ({"model__tokenizer": "@/tokenizer", "family": "qwen2"}, "of a 'qwen2' model as another"),
    ],
)
def test_tokenising_rejects_bad_data_sets_and_tokenizers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "good.jsonl", [{"text": text} for text in TEXTS])
    model = {"family": "llama", "vocab_size": 300} | {key: changes[key] for key in changes if "__" not in key}
    keys = {key: changes[key].replace("@", str(tmp_path)) for key in changes if "__" in key}
    with pytest.raises(UserError, match=message) as error:
        load_tokens(make_config(training__num_samples=2, **keys), tiny_llama(**model))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "good", "bad", "message"),
    [
        ("TOKENIZER", 3_000, 1, r"^\S+, line 3,001: [^\n]*$"),
        ("bpe", 3_000, 3, r"^\S+, line 3,001: [^\n]*$"),
        ("TOKENIZER", 3_000, 3, r"^3 of 3,003 records .*; the first:(\n  - \S+, line 3,00[123]: .*){3}$"),
        ("TOKENIZER", 0, 5_000, r"^\S+, line 1: .* \(none of the 1,024 records that were read can be used\)$"),
    ],
)
def test_the_first_broken_records_are_reported_with_their_number(
    tmp_path: Path, folder: str, kind: str, good: int, bad: int, message: str
) -> None:
    """All records are read, unless none of them can be used, or a BPE is trained on them first."""
    name = tmp_path / "a.jsonl"
    name.write_text('{"text": "def f(x)"}\n' * good + '{"body": "x"}\n' * bad)
    config = make_config(dataset__name=str(name), model__tokenizer=kind.replace("TOKENIZER", folder))
    with pytest.raises(UserError, match=message):
        load_tokens(config, tiny_llama(vocab_size=300))


MEMORY = """
import resource, sys
from workbench.prepare.tokens import write_tokens
from tests.support.oracle import make_config, tiny_llama
peaks = []
for name in sys.argv[2:]:
    write_tokens(make_config(dataset__name=name, model__tokenizer=sys.argv[1]), tiny_llama(vocab_size=300))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
print(*peaks)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_memory_does_not_grow_with_the_file(tmp_path: Path, folder: str) -> None:
    """Peak memory in MiB after a short text, and after 4 MiB in one document, in many, and in one row group."""
    import pandas

    line = "def f(x):\n    return x + 1\n"
    text = line * (2**22 // len(line))
    (tmp_path / "short.txt").write_text(line)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    rows = pandas.DataFrame({"text": [line * 40] * (2**22 // len(line) // 40)})
    rows.to_parquet(tmp_path / "a.parquet", row_group_size=2**20)
    (tmp_path / "b.jsonl").write_text((json.dumps({"text": line}) + "\n") * (2**22 // len(line)))
    names = [str(tmp_path / name) for name in ("short.txt", "a.txt", "b.jsonl", "a.parquet", "a.jsonl")]
    result = run("-c", MEMORY, folder, *names)
    short, *others = map(float, result.stdout.split())
    assert max(others) - short < 100
    assert "Tokenising: 100%" in result.stderr


def test_the_tokenizer_of_a_run_does_not_depend_on_the_process_that_reads_it(tmp_path: Path, folder: str) -> None:
    truncating = PreTrainedTokenizerFast.from_pretrained(folder)
    truncating.backend_tokenizer.enable_truncation(5)
    truncating.save_pretrained(tmp_path / "other")
    config = make_config(model__tokenizer=str(tmp_path / "other"))
    found = read_tokenizer(config, tiny_llama(vocab_size=300))
    assert found.backend_tokenizer.truncation is None


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_that_tokenise_end_with_their_parent_say_nothing_and_leave_nothing(
    folder: str, cache: Path, tmp_path: Path, number: int
) -> None:
    """Ctrl-C reaches all of them; a kill reaches the parent alone. In both cases, they are busy for a long time. What
    they leave in the cache after a kill, the next writer deletes.
    """
    write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "import os, signal, time; from workbench.prepare import tokens, __main__ as prepare\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def encode(*_):\n"
        f"    open({str(tmp_path / 'child')!r}, 'w').write(f'{{os.getpgrp()}}\\n')\n"
        "    time.sleep(600)\n"
        "tokens.Encoding.__getitem__ = encode\n"
        "if __name__ == '__main__': prepare.exit_on_error(prepare.main)\n"
    )
    (tmp_path / "program.py").write_text(program)
    keys = {"dataset.name": tmp_path / "x.jsonl", "dataset.num_proc": 2, "model.tokenizer": folder}
    words = [f"--{key}={value}" for key, value in keys.items()]
    command = [sys.executable, str(tmp_path / "program.py"), "--config", "docs/small.json", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        child = tmp_path / "child"
        while not (group := child.read_text() if child.exists() else "").endswith("\n"):
            assert process.poll() is None
            time.sleep(0.05)
        (os.killpg if number == signal.SIGINT else os.kill)(int(group), number)
        _, printed = process.communicate(timeout=60)  # which waits for all processes that can print
    assert process.returncode == -number
    assert "Traceback" not in printed
    assert len([*cache.glob("*.unfinished")]) == (number == signal.SIGKILL)
    cached("another", "key", lambda _: None)
    assert not [*cache.glob("*.unfinished")]


# ------------------------------------------------------------------------------------------------------ long documents

PROSE = "The quick brown fox, it jumps over 12 lazy dogs; naïve as Žluťoučký kůň. "
DOCUMENT = (
    inspect.getsource(bisect)
    + PROSE * 50
    + f"{PROSE * 3}\n\n{PROSE}  \n\t{PROSE}\n" * 10
    + "日本語のテキスト。私は学生です、" * 150
    + "one</s>\n two <s> three</s>" * 100
)
EMOJI = "🙂👍🏽e\u0301" * 500  # a single word, for which WordPiece has a single token


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_long_document_are_those_of_its_whole_text(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(text_module, "PIECE", 2**10)
    monkeypatch.setattr(text_module, "WINDOW", 2**9)
    assert text_module.CONTEXT <= text_module.PIECE
    make_tokenizer(kind, 480).save_pretrained(other := tmp_path / "other")
    tokenizer, text = AutoTokenizer.from_pretrained(other), DOCUMENT if kind == "WordPiece" else DOCUMENT + EMOJI
    name = write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    config = make_config(dataset__name=name, model__tokenizer=str(other))
    tokens = load_tokens(config, tiny_llama(vocab_size=480))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = [token for token in tokenizer(text)["input_ids"][:1] if token == tokenizer.bos_token_id]
    assert tokens.tolist() == [*start, *whole, tokenizer.eos_token_id]
