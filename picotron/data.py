"""Text -> tokens -> micro-batches.

All documents are tokenised once into one long stream of tokens on disk, which every process then maps into memory.
Window i of the stream is one training sequence: seq_length inputs and, one token further, as many targets. Which window
is global sample number s depends on the seed alone, so a position in the data is one integer, in every layout.
"""

import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from picotron import process_group_manager as pgm
from picotron.config import Config, UserError, reason
from picotron.config import Dataset as DatasetSection

logger = logging.getLogger("picotron")

CACHE = Path.home() / ".cache" / "picotron"
FILE_TYPES = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
END_OF_TEXT = "<|endoftext|>"

# ---------------------------------------------------------------------------------------------------------- documents


def python_stdlib() -> list[str]:
    """The sources of this Python's standard library in a fixed order: real text that every machine has.

    Left out: tests, packages of others, and tables (character sets, the help texts of pydoc).
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "ensurepip", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    files = (path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts))
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def load_documents(section: DatasetSection) -> Any:
    """The data set as a `datasets.Dataset` with one document per row.

    Raises:
        UserError: it does not exist, cannot be read, or has no text where `text_column` says.
    """
    import datasets  # slow to import, and not needed by those who only want the loader

    path = Path(section.name)
    try:
        if section.name == "python-stdlib":
            documents = datasets.Dataset.from_dict({section.text_column: python_stdlib()})
        elif path.is_file():
            if path.suffix not in FILE_TYPES:
                raise UserError(
                    f"dataset.name={section.name!r} ends in {path.suffix!r}; use one of {', '.join(FILE_TYPES)}"
                )
            whole = {"sample_by": "document"} if path.suffix == ".txt" else {}
            documents = datasets.load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split="train", **whole)
        else:
            if not path.is_dir() and (path.suffix in FILE_TYPES or path.is_absolute() or section.name.startswith(".")):
                raise UserError(f"dataset.name={section.name!r}: no such file or folder; check the path")
            whole = {"sample_by": "document"} if path.is_dir() and any(path.rglob("*.txt")) else {}
            documents = datasets.load_dataset(section.name, section.subset_name, split=section.split, **whole)
    except UserError:
        raise
    except Exception as error:  # unknown on the hub, no network, broken file, unknown split, ...
        raise UserError(
            f"dataset.name={section.name!r} cannot be loaded ({reason(error)}); give a hub id, a folder, a file or 'python-stdlib'"
        ) from None
    if section.text_column not in documents.column_names:
        raise UserError(
            f"dataset.text_column={section.text_column!r} is not in {section.name}; use one of {documents.column_names}"
        )
    return documents


# ------------------------------------------------------------------------------------------------------------- tokens


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def train_bpe(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Sennrich et al. 2015, arXiv:1508.07909; Radford et al. 2019) of `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: any text can be written
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
    """The tokenizer that `model.tokenizer` asks for; "bpe" trains one, or finds it in the cache.

    Raises:
        UserError: it cannot be loaded, or has more tokens than the model's vocabulary.
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
            f'no tokenizer in {name!r} ({reason(error)}); set model.tokenizer to a hub id, a folder, or "bpe" to train one'
        ) from None
    if len(tokenizer) > model_config.vocab_size:
        raise UserError(
            f"the tokenizer {name!r} has {len(tokenizer)} tokens, but the model's vocab_size is {model_config.vocab_size}; "
            f"choose another model.tokenizer"
        )
    return tokenizer


def _texts(documents: Any, column: str) -> Iterator[str]:
    for document in documents.select_columns(column):
        if document[column] is not None:
            yield document[column]


def _write_tokens(documents: Any, tokenizer: PreTrainedTokenizerBase, config: Config, dtype: type, path: Path) -> None:
    """Tokenise all documents into one .npy file, each followed by the end-of-sequence token if there is one."""
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

    def parts() -> Iterator[np.ndarray]:
        for rows_part in rows.iter(1000):
            yield from (chunk.flatten().to_numpy() for chunk in rows_part["ids"].chunks)

    # Two passes, since neither the rows nor the stream need to fit into memory.
    stream = np.lib.format.open_memmap(f"{path}.tmp", mode="w+", dtype=dtype, shape=(sum(map(len, parts())),))
    start = 0
    for part in parts():
        stream[start : start + len(part)] = part
        start += len(part)
    stream.flush()
    os.replace(f"{path}.tmp", path)


def load_tokens(config: Config, model_config: LlamaConfig) -> np.ndarray:
    """The data set as one memory-mapped stream of tokens. The first process to come writes it, others wait and read.

    Raises:
        UserError: as `load_documents` and `load_tokenizer`.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    documents = load_documents(config.dataset)
    if config.training.num_samples is not None:
        documents = documents.select(range(min(config.training.num_samples, len(documents))))
    tokenizer = load_tokenizer(config, model_config, documents)
    dtype = np.uint16 if model_config.vocab_size <= 2**16 else np.uint32
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    key = _key(documents._fingerprint, config.dataset.text_column, vocabulary, dtype.__name__)
    path = CACHE / f"tokens-{key}.npy"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _write_tokens(documents, tokenizer, config, dtype, path)
    return np.load(path, mmap_mode="r")


# ------------------------------------------------------------------------------------------------------ micro-batches


class Windows(Dataset[Tensor]):
    """Window i: seq_length + 1 tokens from i * seq_length on, so that neighbours overlap by one token."""

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self.tokens, self.seq_length = tokens, seq_length

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, i: int) -> Tensor:
        start = i * self.seq_length
        return torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))


def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation that (seed, epoch) alone decides: it sorts raw PCG64 output, which numpy never changes."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(windows), kind="stable")


class MicroBatchDataLoader:
    """An endless iterator over this rank's micro-batches.

    Row b of micro-batch i at step s on dp_rank is global sample
    s * G + (i * dp_size + dp_rank) * micro_batch_size + b, where G is global_batch_size; sample n is window number
    n % windows of epoch n // windows. A batch is a dict of `input_ids`, `target_ids`, `position_ids` (B, T) on the CPU
    and `hidden_states` (None).

    Args:
        tokens: the stream, see `load_tokens`.
        config: of the run.
        start_step: the step to begin with.

    Raises:
        UserError: the stream has too few tokens for one global batch.
    """

    def __init__(self, tokens: np.ndarray, config: Config, start_step: int = 0) -> None:
        training, grid = config.training, pgm.process_group_manager
        self.grad_acc_steps = training.gradient_accumulation_steps
        self.micro_batch_size = training.micro_batch_size
        self.seq_length_per_gpu = training.seq_length // grid.cp_world_size
        self.global_batch_size = config.global_batch_size
        self.dp_rank, self.dp_size = grid.dp_rank, grid.dp_world_size
        self.seed, self.shuffle = training.seed, config.dataset.shuffle
        self.windows = Windows(tokens, training.seq_length)
        if len(self.windows) < self.global_batch_size:
            raise UserError(
                f"{config.dataset.name} has {len(tokens):,} tokens, that is {len(self.windows)} sequences of {training.seq_length}; "
                f"one global batch needs {self.global_batch_size}: use more data, a shorter seq_length or a smaller batch"
            )
        self.position_ids = torch.arange(self.seq_length_per_gpu).expand(self.micro_batch_size, -1)
        loader = DataLoader(self.windows, batch_sampler=self._rows(start_step), num_workers=config.dataset.num_workers)
        self.batches = iter(loader)

    def _rows(self, step: int) -> Iterator[list[int]]:
        """The windows of this rank's micro-batches from `step` on, without end."""
        epoch, order = -1, np.arange(len(self.windows))
        while True:
            for i in range(self.grad_acc_steps):
                first = step * self.global_batch_size + (i * self.dp_size + self.dp_rank) * self.micro_batch_size
                rows = []
                for sample in range(first, first + self.micro_batch_size):
                    if self.shuffle and sample // len(order) != epoch:
                        epoch = sample // len(order)
                        order = epoch_order(len(order), self.seed, epoch)
                    rows.append(int(order[sample % len(order)]))
                yield rows
            step += 1

    def __iter__(self) -> "MicroBatchDataLoader":
        return self

    def __next__(self) -> dict[str, Tensor | None]:
        window = next(self.batches)  # (B, T + 1)
        return {
            "input_ids": window[:, :-1],
            "target_ids": window[:, 1:],
            "position_ids": self.position_ids,
            "hidden_states": None,
        }
