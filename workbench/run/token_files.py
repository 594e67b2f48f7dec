"""Token files: a data set as a folder of arrays, which the workbench writes and training maps into memory.

tokens.uint16 or .uint32      the documents as one stream of tokens, or the samples one after the other
counted.uint8  lengths.int64  for samples, see `Samples`
tokenizer/                    files of the tokenizer, which checkpoints copy
token_files.json              see `TokenFiles`
"""

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from transformers import AutoTokenizer, PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config, Dataset, default_of
from picotron.console import UserError
from workbench.console import first_line, invalid_value
from workbench.files import read_object
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.with_keys import with_keys

FILE = "token_files.json"
ARRAYS = ("tokens.uint16", "tokens.uint32", "counted.uint8", "lengths.int64")
KEYS_OF_TEXT = (
    "dataset.mixture", "dataset.subset_name", "dataset.split", "dataset.num_proc", "dataset.assistant_turns",
    "dataset.add_start_token", "dataset.skip_invalid", "training.num_samples", "model.tokenizer",
)  # fmt: skip
Prepare = Callable[[Config, PreTrainedConfig, Path | None], Path]


class Text(NamedTuple):
    """A data set of text.

    Args:
        tokens: the documents as one stream of tokens.
        end: the token after each document, if documents are masked, else None.
    """

    tokens: np.ndarray
    end: int | None = None


class Samples(NamedTuple):
    """A data set for fine-tuning.

    Args:
        tokens: (N,) the tokens of all samples, one sample after the other.
        counted: (N,) whether the loss counts the prediction of a token, 0 or 1.
        lengths: (S,) number of tokens of each sample.
    """

    tokens: np.ndarray
    counted: np.ndarray
    lengths: np.ndarray


class TokenFiles(BaseModel):
    """Contents of token_files.json."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    end: NonNegativeInt | None
    """the end-of-sequence token, which follows each document"""
    vocab_size: NonNegativeInt
    """highest token of the tokenizer + 1"""
    digest: str
    """hash of the other files, see `digest_of`; "" if it is unknown"""
    sizes: dict[str, NonNegativeInt]
    """numbers of bytes of the other files"""


def has_token_files(folder: Path) -> bool:
    """Return, on every rank, whether any rank finds token files in a folder. Every rank must call this."""
    return any(run_on_all_ranks(lambda: os.path.isfile(folder / FILE)))


def digest_of(folder: Path) -> str:
    """Return a hash of the contents of all files in a folder but FILE."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE):
        with path.open("rb") as file:
            sums[str(path.relative_to(folder))] = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:24]


def load_data(
    config: Config, model_config: PreTrainedConfig, trained: Path | None, prepare: Prepare | None
) -> tuple[Text | Samples, Text | Samples | None, Path]:
    """Map the data set of a config into memory, and the one for evaluations. Every rank must call this.

    Args:
        trained: folder of the tokenizer with which the model was trained so far, or None.
        prepare: function that writes the token files of a data set, if one of them is not token files.

    Returns:
        The data, those of `eval_name` or None, and the tokenizer's folder.

    Raises:
        UserError: see `load_token_files`.
    """

    def load(config: Config, trained: Path | None) -> tuple[Text | Samples, Path]:
        folder = Path(config.dataset.name)
        if prepare and not has_token_files(folder):
            folder = prepare(config, model_config, trained)
        return load_token_files(folder, config, model_config, trained)

    data, tokenizer = load(config, trained)
    if config.dataset.eval_name is None:
        return data, None, tokenizer
    evaluation = for_data(config, config.dataset.eval_name, str(tokenizer), config.dataset.eval_split)
    return data, load(evaluation, tokenizer)[0], tokenizer


def for_data(config: Config, name: str, tokenizer: str | None, split: str | None = None) -> Config:
    """Return a config with another data set, of which all documents are read, and with a tokenizer."""
    dataset = {"name": name, "eval_name": name, "split": split or config.dataset.split, "mixture": None}
    return with_keys(config, dataset=dataset, training={"num_samples": None}, model={"tokenizer": tokenizer})


def load_token_files(
    folder: Path, config: Config, model_config: PreTrainedConfig, trained: Path | None
) -> tuple[Text | Samples, Path]:
    """Map the arrays of a folder into memory. Every rank must call this. Returns the data and the tokenizer's folder.

    Args:
        trained: folder of the tokenizer with which the model was trained so far, or None.

    Raises:
        UserError: on every rank, if the machines have different data, the model was trained with another tokenizer, or
            a folder that the config names was damaged; see also `map_token_files`.
    """
    data: list[Text | Samples] = []

    def load() -> tuple[str, str]:
        mapped, digest = map_token_files(folder, config, model_config)
        if pgm.process_group_manager.local_rank == 0:  # once per machine
            if folder == Path(config.dataset.name):  # what this machine has written itself is in the cache
                check_contents(folder, mapped, digest, model_config)
            if trained is not None:
                check_tokenizer(folder / "tokenizer", trained)
        data.append(mapped)  # not returned, because results are sent to all ranks
        return digest, platform.node()

    hosts = dict(run_on_all_ranks(load))
    if len(hosts) > 1:
        raise UserError(
            f"{' and '.join(hosts.values())} have different tokens or tokenizers for dataset.name="
            f"{config.dataset.name!r}; copy the same data and tokenizer to all machines"
        )
    return data[0], folder / "tokenizer"


def map_token_files(folder: Path, config: Config, model_config: PreTrainedConfig) -> tuple[Text | Samples, str]:
    """Check a folder, and map its arrays into memory. Returns the data and their digest.

    Raises:
        UserError: the files are damaged, they do not fit the config or the model, or a key has no effect on them.
    """
    section, again = config.dataset, "tokenise the data again"
    if folder == Path(section.name) and not section.eval_name:  # otherwise, these keys have their effect elsewhere
        given = {f"{name}.{key}": value for name, body in config for key, value in body}
        if unused := [f"{key}={given[key]!r}" for key in KEYS_OF_TEXT if given[key] != default_of(key)]:
            raise UserError(*(f"{each} has no effect on the token files in {folder}; remove it" for each in unused))
    try:
        facts = TokenFiles.model_validate(read_object(folder / FILE))
    except ValidationError as error:
        raise UserError(f"{folder / FILE}: {invalid_value(error.errors()[0])}; {again}") from None
    for name, size in facts.sizes.items():
        found = os.path.getsize(folder / name) if os.path.isfile(folder / name) else 0
        if found != size:
            raise UserError(
                f"{folder / name} has {found:,} bytes, but {size:,} were written; copy the whole folder again, or delete it"
            )
    names = [name.split(".") for name in ARRAYS if name in facts.sizes]
    try:
        arrays: dict[str, Any] = {name: np.memmap(folder / f"{name}.{dtype}", dtype, "r") for name, dtype in names}
    except (OSError, ValueError) as error:  # no permission, no tokens, or a part of one
        raise UserError(f"an array in {folder} cannot be read ({first_line(error)}); {again}") from None
    counts = {name: int(array.sum()) if name == "lengths" else len(array) for name, array in arrays.items()}
    if set(counts) not in ({"tokens"}, {*Samples._fields}) or len({*counts.values()}) > 1:
        raise UserError(f"{folder} has arrays for other numbers of tokens: {counts}; {again}")
    if section.has_samples != ("lengths" in arrays):
        raise UserError(
            f"{folder} has {'samples' if 'lengths' in arrays else 'text'}, but the columns of dataset are "
            f"{section.columns}; set the keys of the columns with which it was tokenised"
        )
    if facts.vocab_size > model_config.vocab_size:
        raise UserError(
            f"the tokenizer of {folder} has {facts.vocab_size} tokens, but the model's vocab_size is "
            f"{model_config.vocab_size}; choose another model, or tokenise the data with another model.tokenizer"
        )
    check_end(section, facts.end)
    end = facts.end if section.masks_documents else None
    return Samples(**arrays) if section.has_samples else Text(arrays["tokens"], end), facts.digest


def check_contents(folder: Path, data: Text | Samples, digest: str, model_config: PreTrainedConfig) -> None:
    """Raise a UserError if files are not those that were written, or if tokens are not in the model's vocabulary, which
    tensor parallelism would take for tokens of another rank, or if a target would count several times.
    """
    if digest and digest_of(folder) != digest:
        raise UserError(f"files in {folder} differ from those that were written; copy the whole folder again")
    if (largest := int(data.tokens.max())) >= model_config.vocab_size:
        raise UserError(
            f"{folder} has the token {largest}, but the model's vocab_size is {model_config.vocab_size}; tokenise the data "
            f"again, with a tokenizer of this model"
        )
    if isinstance(data, Samples) and (data.counted.max() > 1 or data.lengths.min() < 0):
        raise UserError(
            f"{folder} has a number in counted that is not 0 or 1, or a negative one in lengths; correct the file"
        )


def check_tokenizer(folder: Path, trained: Path) -> None:
    """Raise a UserError if a number stands for different tokens in two tokenizers. (Either may have more tokens.)"""
    vocabularies = (AutoTokenizer.from_pretrained(each).get_vocab() for each in (folder, trained))
    ours, theirs = ({i: token for token, i in each.items()} for each in vocabularies)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            raise UserError(
                f"token {number} of the data is {ours[number]!r}, but the model in {trained} was trained with a tokenizer in "
                f"which it is {theirs[number]!r}; tokenise the data with that tokenizer (model.tokenizer={str(trained)!r}), or "
                f"start from random weights"
            )


def check_end(section: Dataset, end: int | None) -> None:
    """Raise a UserError if documents cannot be masked, because no token ends them."""
    if section.masks_documents and not section.has_samples and end is None:
        raise UserError(
            "dataset.mask_documents=true, but the tokenizer has no end-of-sequence token, which ends documents; set it "
            "to false, or tokenise the data with another model.tokenizer"
        )
