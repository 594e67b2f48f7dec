"""Text -> tokens: the documents of a data set are tokenised once, into one long stream of tokens on disk."""

import datetime
import hashlib
import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from filelock import FileLock
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.config import Dataset as DatasetSection
from picotron.errors import UserError, first_line

logger = logging.getLogger("picotron")

CACHE = Path.home() / ".cache" / "picotron"
FILE_TYPES = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
END_OF_TEXT = "<|endoftext|>"


def python_stdlib() -> list[str]:
    """Read the source files of this Python's standard library in a fixed order: real text that every machine has.

    Excluded are tests, installed packages and tables (character sets, the help texts of pydoc).
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "ensurepip", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    files = (path for path in sorted(root.rglob("*.py")) if not excluded & set(path.relative_to(root).parts))
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def _load_named(section: DatasetSection) -> Any:
    """Load the data set that `section.name` refers to: python-stdlib, a file, a folder or a hub id."""
    import datasets  # imported here because it is slow, and only one process per machine needs it

    name, path, split = section.name, Path(section.name), section.split
    if section.subset_name is not None and (name == "python-stdlib" or path.is_file()):
        raise UserError(f"dataset.subset_name={section.subset_name!r}, but {name} has no subsets; remove it")
    if name == "python-stdlib":
        if split != "train":
            raise UserError(f"dataset.split={split!r}, but {name} has only the split 'train'; remove it")
        return datasets.Dataset.from_dict({section.text_column: python_stdlib()})
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise UserError(f"dataset.name={name!r} has file type {path.suffix!r}; use one of {', '.join(FILE_TYPES)}")
        options = {"sample_by": "document"} if path.suffix == ".txt" else {}  # one document per file, not per line
        return datasets.load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split=split, **options)
    if path.is_dir() and {file.suffix for file in path.rglob("*")} & FILE_TYPES.keys() == {".txt"}:
        return datasets.load_dataset("text", data_dir=name, split=split, sample_by="document")
    if not path.is_dir() and (path.suffix in FILE_TYPES or path.is_absolute() or name.startswith(".")):
        raise UserError(f"dataset.name={name!r}: there is no such file or folder; check the path")
    return datasets.load_dataset(name, section.subset_name, split=split)


def load_documents(section: DatasetSection) -> Any:
    """Load the data set as a `datasets.Dataset` with one document per row.

    Raises:
        UserError: the data set does not exist, cannot be read, or has no text in the column `text_column`.
    """
    try:
        documents = _load_named(section)
    except UserError:
        raise
    except Exception as error:  # unknown on the hub, no network, broken file, unknown split, ...
        raise UserError(
            f"dataset.name={section.name!r} cannot be loaded ({first_line(error)}); use a hub id, a folder, a file or "
            f"'python-stdlib'"
        ) from None
    dtypes = {name: str(getattr(feature, "dtype", "nested")) for name, feature in documents.features.items()}
    if dtypes.get(section.text_column) not in ("string", "large_string"):
        text_columns = [name for name, dtype in dtypes.items() if dtype in ("string", "large_string")]
        raise UserError(
            f"dataset.text_column={section.text_column!r} of {section.name} has no text; use one of {text_columns}"
        )
    return documents


def _key(*parts: str) -> str:
    """Hash of everything that a cached file depends on, for its name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def train_bpe(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (Sennrich et al. 2015, arXiv:1508.07909; Radford et al. 2019) of `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that any text can be encoded
    if vocab_size <= len(alphabet):
        raise UserError(
            f"vocab_size={vocab_size} is too small for a byte-level BPE; it needs at least {len(alphabet) + 1}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)


def load_tokenizer(config: Config, model_config: LlamaConfig, documents: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run. If `model.tokenizer` is "bpe", train one, unless it is in the cache.

    Raises:
        UserError: the tokenizer cannot be loaded, or has more tokens than the model's vocabulary.
    """
    if config.model.tokenizer == "bpe":
        folder = CACHE / f"bpe-{_key(documents._fingerprint, config.dataset.text_column, str(model_config.vocab_size))}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                logger.info(
                    "training a byte-level BPE of %d tokens on %s", model_config.vocab_size, config.dataset.name
                )
                tokenizer = train_bpe(_texts(documents, config.dataset.text_column), model_config.vocab_size)
                tokenizer.save_pretrained(f"{folder}.tmp")
                os.replace(f"{folder}.tmp", folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)
    name = config.model.tokenizer or config.model.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserError(
            f"cannot load a tokenizer from {name!r} ({first_line(error)}); set model.tokenizer to a hub id, a "
            f'folder, or "bpe" to train one'
        ) from None
    tokens = max(tokenizer.get_vocab().values()) + 1  # not len(tokenizer), because ids may have gaps
    if tokens > model_config.vocab_size:
        raise UserError(
            f"the tokenizer {name!r} has {tokens} tokens, but the model's vocab_size is {model_config.vocab_size}; "
            f"choose another model.tokenizer"
        )
    return tokenizer


def _texts(documents: Any, column: str) -> Iterator[str]:
    """Iterate over the texts of the documents that have one."""
    for document in documents.select_columns(column):
        if document[column] is not None:
            yield document[column]


def _write_tokens(documents: Any, tokenizer: PreTrainedTokenizerBase, config: Config, dtype: type, path: Path) -> None:
    """Write the tokens of all documents to one .npy file. The end-of-sequence token follows each document, if the
    tokenizer has one.
    """
    column, end = config.dataset.text_column, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenise(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch[column] if text]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return {"ids": [document + end for document in ids]}

    rows = documents.map(
        tokenise,
        batched=True,
        batch_size=100,
        remove_columns=documents.column_names,
        num_proc=config.dataset.num_proc if config.dataset.num_proc > 1 else None,
        new_fingerprint=path.stem,
        desc="Tokenising",
    ).with_format("arrow")

    def chunks() -> Iterator[np.ndarray]:
        for batch in rows.iter(1000):
            yield from (chunk.flatten().to_numpy() for chunk in batch["ids"].chunks)

    # The first pass counts the tokens, the second copies them, so neither rows nor stream need to fit into memory.
    stream = np.lib.format.open_memmap(f"{path}.tmp", mode="w+", dtype=dtype, shape=(sum(map(len, chunks())),))
    start = 0
    for chunk in chunks():
        stream[start : start + len(chunk)] = chunk
        start += len(chunk)
    stream.flush()
    os.replace(f"{path}.tmp", path)


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, rules: str) -> Path:
    """Save a tokenizer in the cache, unless it is there, and return its folder.

    Args:
        rules: description of how the tokenizer turns text into tokens.
    """
    folder = CACHE / f"tokenizer-{_key(rules, json.dumps(tokenizer.init_kwargs, default=str, sort_keys=True))}"
    if not folder.exists():
        shutil.rmtree(f"{folder}.tmp", ignore_errors=True)
        tokenizer.save_pretrained(f"{folder}.tmp")
        os.replace(f"{folder}.tmp", folder)
    return folder


def write_tokens(config: Config, model_config: LlamaConfig) -> tuple[Path, Path]:
    """Tokenise the data set, unless its tokens are in the cache.

    Returns:
        The paths of the stream of tokens, an .npy file, and of the tokenizer's folder, both in the cache.

    Raises:
        UserError: see `load_documents` and `load_tokenizer`.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):  # another run on this machine may need the same files
        documents = load_documents(config.dataset)
        if config.training.num_samples is not None:
            documents = documents.select(range(min(config.training.num_samples, len(documents))))
        tokenizer = load_tokenizer(config, model_config, documents)
        rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
        dtype = np.uint16 if model_config.vocab_size <= 2**16 else np.uint32
        key = _key(
            documents._fingerprint, config.dataset.text_column, rules, str(tokenizer.eos_token_id), dtype.__name__
        )
        path = CACHE / f"tokens-{key}.npy"
        if not path.exists():
            _write_tokens(documents, tokenizer, config, dtype, path)
        return path, _write_tokenizer(tokenizer, rules)


def load_tokens(config: Config, model_config: LlamaConfig) -> tuple[np.ndarray, Path]:
    """Load the data set as one memory-mapped stream of tokens. One process per machine tokenises it, if necessary, and
    the others wait.

    Returns:
        The tokens, and the folder of the tokenizer.

    Raises:
        UserError: see `load_documents` and `load_tokenizer`.
    """
    paths = [write_tokens(config, model_config)] if pgm.process_group_manager.local_rank == 0 else [(Path(), Path())]
    # A separate group with a long timeout, because tokenising may take longer than the default timeout of collectives.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    dist.barrier(group)
    dist.broadcast_object_list(paths, src=0, group=group)
    dist.destroy_process_group(group)
    tokens, tokenizer = paths[0]
    return np.load(tokens, mmap_mode="r"), tokenizer
