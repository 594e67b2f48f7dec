"""Token files: a run on them equals the run on the text that they were made of, and each mistake is a sentence."""

import functools
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from picotron.process_group_manager import setup_process_group_manager
from tests.support.messages import error_of
from tests.support.oracle import make_config, tiny_llama
from tests.support.program import arguments, metrics, run
from tests.support.samples import PROMPTS, write_jsonl, write_tokenizer
from workbench.prepare.__main__ import main
from workbench.prepare.tokens import write_tokens
from workbench.run.token_files import FILE, has_token_files, load_token_files, map_token_files

TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * 20 for i in range(60)]
MODEL = tiny_llama(vocab_size=300)
PROGRAM = """
import json, sys, train
for number, words in enumerate(json.loads(sys.argv[1])):
    sys.argv = ["train.py", *words]
    train.main()
    if number == 0:
        modules = list(sys.modules)
print("modules", *modules)
"""


@pytest.mark.processes
def test_a_run_on_token_files_equals_the_run_on_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses, weights and evaluations are bitwise equal, also of a run that resumes on the other one. A run on token
    files imports no code that makes them.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS])
    tokenizer = write_tokenizer(tmp_path / "tokenizer")

    def words(save_dir: str, load_path: str = "", **data: Any) -> list[str]:
        path = str(tmp_path / load_path) if load_path else ""
        more = {"checkpoint.save_frequency": 2, "checkpoint.load_path": path, **data}
        return arguments(tmp_path / save_dir, 1, 1, **more)

    text = {"dataset.name": data, "model.tokenizer": tokenizer}
    files = {"dataset.name": str(tmp_path / "copy"), "model.tokenizer": "null", "training.num_samples": "null"}
    monkeypatch.setattr("sys.argv", ["tokens", *words("unused", **text)])
    main()
    prepared = Path(capsys.readouterr().out.splitlines()[-1])
    shutil.copytree(prepared, tmp_path / "copy")
    runs = [words("files", **files), words("text", **text), words("resumed", "text/step_00000002", **files)]
    result = run("-c", PROGRAM, json.dumps(runs))
    modules = result.stdout.splitlines()[-1].split()
    rooms = {module.split(".")[1] for module in modules if module.startswith("workbench.")}
    assert rooms == {"console", "files", "run"}
    assert [*prepared.parent.glob(f"tokens-*/{FILE}")] == [prepared / FILE]  # the run has found it

    fields = ("step", "loss", "grad_norm", "tokens", "eval_loss", "bits_per_byte")
    records = {
        name: [[line.get(field) for field in fields] for line in metrics(tmp_path / name)]
        for name in ("text", "files", "resumed")
    }
    assert [len(records["text"]), records["text"][-1][-1] is not None] == [4, True]
    assert records["files"] == records["text"]
    assert records["resumed"] == records["text"][2:]
    for file in ("model.safetensors", "exp_avg.safetensors", "tokenizer.json"):
        assert len({(tmp_path / name / "step_00000004" / file).read_bytes() for name in records}) == 1


@pytest.fixture
def folders(tmp_path: Path, folder: str) -> dict[str, Path]:
    """Copies of the token files of a text and of samples."""
    for kind in ("text", "samples"):
        name = write_jsonl(tmp_path / f"{kind}.jsonl", [{"text": text, "q": text[:20], "a": text} for text in TEXTS])
        config = make_config(dataset__name=name, model__tokenizer=folder, **PROMPTS if kind == "samples" else {})
        shutil.copytree(write_tokens(config, MODEL), tmp_path / kind / "tokens")
    return {kind: tmp_path / kind / "tokens" for kind in ("text", "samples")}


def damage(folder: Path, changes: dict[str, Any]) -> None:
    """Change keys of token_files.json, or cut files to a number of bytes."""
    facts = json.loads((folder / FILE).read_text())
    changes["sizes"] = facts["sizes"] | changes.get("sizes", {})
    (folder / FILE).write_text(json.dumps(facts | {key: changes[key] for key in changes if "." not in key}))
    for name in (key for key in changes if "." in key):
        os.truncate(folder / name, changes[name])


MASKED = {"dataset__mask_documents": True}
MIXTURE = {"dataset__split": "a", "dataset__mixture": {"b": 1.0}, "model__tokenizer": "bpe"}
ODD, SHORT = ({name: size, "sizes": {name: size}} for name, size in (("tokens.uint16", 3), ("lengths.int64", 8)))
MISTAKES = [
    ("text", {FILE: 5}, {}, f"{FILE} is not valid JSON"),
    ("text", {"tokens.uint16": 8}, {}, r"tokens.uint16 has 8 bytes, but [\d,]+ were written; copy the whole folder"),
    ("text", ODD, {}, r"an array in .*/tokens cannot be read \(Size of .*\); tokenise the data again"),
    ("samples", SHORT, PROMPTS, r"of tokens: \{'tokens': (\d+), 'counted': \1, 'lengths': \d+\}; tokenise"),
    ("text", {"vocab_size": 301}, {}, "has 301 tokens, but the model's vocab_size is 300; choose another model, or"),
    ("text", {"end": None}, MASKED, "=true, but the tokenizer has no end-of-sequence .*; set it to false"),
    ("text", {}, PROMPTS, "tokens has text, but the columns of dataset are {'prompt_column': 'q', .*; set the keys"),
    ("text", {}, MIXTURE, "3 problems:\n.*mixture={'b'.*\n.*split='a'.*\n.*tokenizer='bpe'"),
]


@pytest.mark.parametrize(("kind", "changes", "keys", "message"), MISTAKES)
def test_mistakes(
    folders: dict[str, Path], kind: str, changes: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    damage(folders[kind], dict(changes))
    with pytest.raises(UserError, match=message):
        map_token_files(folders[kind], make_config(dataset__name=str(folders[kind]), **keys), MODEL)


def load_each(hosts: list[list[Path]], trained: Path | None = None) -> list[str]:
    """Load the folders of this rank's host as their configs' data. Returns the mistakes."""
    setup_process_group_manager(1, 1, 1, len(hosts))

    def load(folder: Path) -> None:
        assert has_token_files(folder)
        columns = PROMPTS if (folder / "lengths.int64").exists() else {}
        load_token_files(folder, make_config(dataset__name=str(folder), **columns), MODEL, trained)

    with mock.patch("platform.node", return_value=f"host{dist.get_rank()}"):
        return [error_of(functools.partial(load, folder)) for folder in hosts[dist.get_rank()]]


def test_random_damage_that_keeps_the_sizes_is_found(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    dice, copies = random.Random(1), []
    for number in range(30):
        folder = folders[dice.choice(["text", "samples"])]
        copies.append(Path(shutil.copytree(folder, tmp_path / f"{number}")))
        files = [path for path in copies[-1].rglob("*") if path.is_file() and path.name != FILE]
        content = bytearray((path := dice.choice(files)).read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
    (found,) = pool.run(load_each, 1, [[*folders.values(), *copies]])
    assert found[:2] == ["no error"] * 2
    assert "no error" not in found[2:]
    assert sum("copy the whole folder again" in each for each in found) > 20  # others, by wrong lengths


WRONG = {
    "tokens.uint16": ("text", 300, "has the token 300, but the model's vocab_size is 300"),
    "counted.uint8": ("samples", 2, "has a number in counted that is not 0 or 1"),
    "lengths.int64": ("samples", -1, "or a negative one in lengths"),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_out_of_range_are_found(pool: WorkerPool, folders: dict[str, Path], name: str) -> None:
    """In a folder that a program of the user has written, which may leave out the digest."""
    kind, value, message = WRONG[name]
    numbers = np.memmap(folders[kind] / name, name.split(".")[1], "r+")
    if value < 0:
        numbers[0] += numbers[-2] - value  # the sum of lengths is the number of tokens
    numbers[-2] = value
    damage(folders[kind], {"digest": ""})
    (found,) = pool.run(load_each, 1, [[folders[kind]]])
    assert message in found[0]


def test_token_files_of_another_tokenizer_than_the_models_are_found(
    pool: WorkerPool, folders: dict[str, Path], folder: str, tmp_path: Path
) -> None:
    larger, other = AutoTokenizer.from_pretrained(folder), json.loads(Path(folder, "tokenizer.json").read_text())
    larger.add_tokens(["<new>"])
    larger.save_pretrained(tmp_path / "larger")
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(other))
    assert pool.run(load_each, 1, [[folders["text"]]], tmp_path / "larger") == [["no error"]]
    (found,) = pool.run(load_each, 1, [[folders["text"]]], tmp_path / "other")
    assert re.search(r"token \d+ of the data is '[ab]', but the model .* a tokenizer in which it is '[ab]'", found[0])


def test_hosts_with_different_folders_are_rejected(pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Also if one of them has no token files: no rank waits for another one."""
    other, missing = Path(shutil.copytree(folders["text"], tmp_path / "other")), tmp_path / "missing"
    damage(other, {"digest": "other"})
    for found in pool.run(load_each, 2, [[folders["text"]] * 2, [other, missing]]):
        assert "host0 and host1 have different tokens or" in found[0]
        assert "cannot read /" in found[1]
