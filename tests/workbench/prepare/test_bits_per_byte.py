"""Bits per byte: the loss of held-out data in a unit that does not depend on the tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from conformance.fuzz.tokenizer_kinds import CORPUS, make_tokenizer
from picotron.data.loader import TextRows
from tests.support.oracle import tiny_llama
from tests.support.samples import config_of, encode, write_jsonl
from workbench.prepare.tokens import write_tokens
from workbench.run.rows import SomeRows, targets_and_bytes
from workbench.run.token_files import map_token_files
from workbench.variants.choose import split_train_eval

KINDS = ("prepend", "metaspace first", "byte-level", "byte-level trimmed", "ByT5")  # those that can restore any text
TEXTS = ["def f(x):\n    return x + 1\n", "naïve 日本語のテキスト。 🙂👍🏽", "", "It is 4.", "語", *CORPUS[:40]]


def write_tokenizer(folder: str, kind: str) -> PreTrainedTokenizerBase:
    """Save a tokenizer. Its tokens for single bytes are not special, as in models."""
    make_tokenizer(kind).save_pretrained(folder)
    if (path := Path(folder, "tokenizer.json")).exists():
        data = json.loads(path.read_text())
        data["added_tokens"] = [each for each in data["added_tokens"] if not each["content"].startswith("<0x")]
        path.write_text(json.dumps(data))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_samples_are_those_of_their_completions(folder: str, tmp_path: Path, kind: str) -> None:
    write_tokenizer(folder, kind)
    pairs = [{"q": f"Prompt: {i}", "a": text} for i, text in enumerate(TEXTS)]
    config = config_of(
        write_jsonl(tmp_path / "pairs.jsonl", pairs),
        folder,
        training__seq_length=1000,
        training__micro_batch_size=1,
        dataset__prompt_column="q",
        dataset__completion_column="a",
    )
    samples = encode(config, 480)
    rows, _ = split_train_eval(samples, config)
    assert targets_and_bytes(rows, Path(folder)) == (
        samples.counted.sum(),
        sum(len(text.encode()) for text in TEXTS),
    )


@pytest.mark.parametrize("kind", ["metaspace first", "byte-level"])
def test_bytes_of_text_are_those_between_the_first_and_the_last_target(folder: str, tmp_path: Path, kind: str) -> None:
    """The bounds of some rows are within a character."""
    tokenizer, seq_length = write_tokenizer(folder, kind), 7
    text = "(" + "".join(TEXTS)  # decoders strip a space in front of the first target
    (tmp_path / "text.txt").write_text(text)
    config = config_of(str(tmp_path / "text.txt"), folder, training__seq_length=seq_length)
    model_config = tiny_llama(vocab_size=480)
    data, _ = map_token_files(write_tokens(config, model_config), config, model_config)
    rows = TextRows(data.tokens, seq_length)
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    first = (
        0 if tokenizer(text)["input_ids"][0] == tokenizer.bos_token_id else 1
    )  # if not, the first token is no target
    last = min(first - 1 + len(rows) * seq_length, len(spans) - 1)  # the end-of-sequence token after it has no text
    expected = text[spans[first][0] : spans[last][1]].encode()
    assert targets_and_bytes(rows, Path(folder)) == (len(rows) * seq_length, len(expected))
    # Those of every other row, and of the rest, have all characters but one that the last row cuts.
    halves = [SomeRows(rows, np.arange(first, len(rows), 2)) for first in (0, 1)]
    whole = tokenizer.decode(data.tokens[: len(rows) * seq_length + 1])
    cut = len(whole.encode()) - len(whole.rstrip("\ufffd").encode())
    assert sum(targets_and_bytes(each, Path(folder))[1] for each in halves) == len(expected) - cut
