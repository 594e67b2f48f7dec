"""Text -> tokens: a data set is tokenised once, into arrays on disk: the documents of a text into one long stream of
tokens, samples for fine-tuning into their tokens, lengths and a mask.
"""

import contextlib
import datetime
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from picotron import process_group_manager as pgm
from picotron.collectives import run_on_all_ranks
from picotron.config import Config
from picotron.console import UserError, first_line
from picotron.data.cache import cached, checksums
from picotron.data.document_files import Block
from picotron.data.documents import Documents, load_documents
from picotron.data.encoder import Encoder, TextEncoder
from picotron.data.rows import Samples, Text
from picotron.data.samples import SampleEncoder
from picotron.model.hub import connect
from picotron.run.launch import ignore_stop_signals

logger = logging.getLogger("picotron")


VERSION = 2  # part of the keys of cached tokens; add 1 if the same data and tokenizer give other tokens than before


END_OF_TEXT = "<|endoftext|>"


BATCH_BYTES = 2**20  # of text that is tokenised at a time


BPE_CHARACTERS = 2**28  # maximum number of characters to train a BPE on


LONG_WORD = re.compile(r"\S{256}(?=\S)|\s{256}(?=\s)")


def train_bpe(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (Sennrich et al. 2015, arXiv:1508.07909; Radford et al. 2019) of `vocab_size` tokens on
    the first BPE_CHARACTERS characters of the texts.
    """
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
    bpe.train_from_iterator(_short_words(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)


def _short_words(texts: Iterator[str]) -> Iterator[str]:
    """Cut words of more than 256 characters, because the time of a BPE's training is quadratic in a word's length."""
    left = BPE_CHARACTERS
    for text in texts:
        start = 0
        for end in [*(match.end() for match in LONG_WORD.finditer(text)), len(text)]:
            yield text[start:end]
            start = end
        left -= len(text)
        if left <= 0:
            logger.info("the BPE is trained on the first %s characters only", f"{BPE_CHARACTERS:,}")
            return


def load_tokenizer(config: Config, model_config: LlamaConfig, documents: Documents) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run. If `model.tokenizer` is "bpe", train one, unless it is in the cache.

    Raises:
        UserError: the tokenizer cannot be loaded, or has more tokens than the model's vocabulary.
    """
    if config.model.tokenizer == "bpe":
        if column := config.dataset.messages_column:
            raise UserError(
                f"dataset.messages_column={column!r} needs a tokenizer with a chat template, which model.tokenizer='bpe' "
                f"has not; choose another model.tokenizer"
            )

        def write(folder: Path) -> None:
            logger.info("training a byte-level BPE of %d tokens on %s", model_config.vocab_size, documents.name)
            size = min(sum(block.size for block in documents.blocks), BPE_CHARACTERS)
            quick = size < 2**24  # a few seconds need no progress bar
            with tqdm(total=size, unit="B", unit_scale=True, desc="Reading", mininterval=1, disable=quick) as progress:
                train_bpe(_counted(documents, progress), model_config.vocab_size).save_pretrained(folder)

        return PreTrainedTokenizerFast.from_pretrained(
            cached("bpe", f"{documents.key} {model_config.vocab_size}", write)
        )
    name = config.model.tokenizer or config.model.name
    if not Path(name).is_dir():
        connect(name)
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


def _counted(documents: Documents, progress: Any) -> Iterator[str]:
    """Yield the texts of all documents, and count the bytes that are read."""
    for block in documents.blocks:
        yield from (piece.text for piece in documents.read(block))
        progress.update(block.size)


class EncodedBlocks(Dataset[list[dict[str, np.ndarray]] | UserError]):
    """Parts of the arrays, from each batch of blocks.

    A UserError is returned as an item, because a loader adds a traceback to an error that a worker raises.
    """

    def __init__(self, documents: Documents, batches: list[list[Block]], encoder: Encoder) -> None:
        self.documents, self.batches, self.encoder = documents, batches, encoder

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> list[dict[str, np.ndarray]] | UserError:
        read, encoder = self.documents.read, self.encoder
        items = (item for block in self.batches[i] for item in read(block, encoder.convert) if encoder.size(item))
        try:
            return [encoder.encode(batch) for batch in iter(lambda: _next_batch(items, encoder), [])]
        except UserError as error:
            return error


def _next_batch(items: Iterator[Any], encoder: Encoder) -> list[Any]:
    """Return the next items, with at least BATCH_BYTES characters in total unless they are the last ones. (A block of
    a parquet file can have many more.)
    """
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += encoder.size(item)
        if size >= BATCH_BYTES:
            break
    return batch


def _in_batches(blocks: list[Block]) -> list[list[Block]]:
    """Group consecutive blocks, so that a tokenizer with several threads gets several texts."""
    batches: list[list[Block]] = []
    size = BATCH_BYTES
    for block in blocks:
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(block)
        size += block.size
    return batches


def _start_worker(worker: int) -> None:
    ignore_stop_signals(worker)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process has none of the tokenizer's threads


def _write_arrays(documents: Documents, encoder: Encoder, processes: int, folder: Path) -> None:
    """Write the arrays of all documents, each to one .npy file."""
    batches = _in_batches(documents.blocks)
    loader = DataLoader(
        EncodedBlocks(documents, batches, encoder),
        batch_size=None,
        collate_fn=lambda parts: parts,  # not as tensors, which would need shared memory
        num_workers=processes if processes > 1 else 0,
        multiprocessing_context="fork" if processes > 1 else None,
        worker_init_fn=_start_worker,
    )
    size = sum(block.size for block in documents.blocks)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(tqdm(total=size, unit="B", unit_scale=True, desc="Tokenising", mininterval=1))
        files = {
            name: stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype))
            for name, dtype in encoder.dtypes.items()
        }
        for batch, parts in zip(batches, loader, strict=True):
            if isinstance(parts, UserError):
                raise parts
            for name, values in (item for part in parts for item in part.items()):
                files[name].append(values)
            progress.update(sum(block.size for block in batch))
        if files["tokens"].count == 0:
            raise UserError(f"dataset.name={documents.name!r} has no text; choose other data")


class TokenisedData(NamedTuple):
    """Folders in the cache: of the arrays, and of the tokenizer; and its end-of-sequence token."""

    arrays: Path
    tokenizer: Path
    end: int | None


def write_tokens(config: Config, model_config: LlamaConfig) -> TokenisedData:
    """Tokenise the data set, unless its tokens are in the cache.

    Raises:
        UserError: see `load_documents`, `load_tokenizer` and `SampleEncoder`.
    """
    section = config.dataset
    documents = load_documents(section, config.training.num_samples)
    tokenizer = load_tokenizer(config, model_config, documents)
    end = tokenizer.eos_token_id
    if section.masks_documents and not section.has_samples and end is None:
        raise UserError(
            "dataset.mask_documents=true, but the tokenizer has no end-of-sequence token, which ends documents; set it "
            "to false, or choose another model.tokenizer"
        )
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    dtype = np.uint16 if model_config.vocab_size <= 2**16 else np.uint32
    key: tuple[Any, ...] = (VERSION, documents.key, rules, end, dtype.__name__)
    if section.has_samples:
        key += (tokenizer.bos_token_id, tokenizer.chat_template)

    def write(folder: Path) -> None:
        encoder: Encoder = TextEncoder(tokenizer, dtype)
        if section.has_samples:
            encoder = SampleEncoder(documents.columns, tokenizer, dtype)
        _write_arrays(documents, encoder, section.num_proc, folder)

    arrays = cached("tokens", repr(key), write)
    key_of_tokenizer = f"{rules} {json.dumps(tokenizer.init_kwargs, default=str, sort_keys=True)}"
    return TokenisedData(arrays, cached("tokenizer", key_of_tokenizer, lambda new: tokenizer.save_pretrained(new)), end)


def load_data(config: Config, model_config: LlamaConfig) -> tuple[Text | Samples, Path]:
    """Load the data set as memory-mapped arrays. One process per machine tokenises it, if necessary, and the others
    wait.

    Returns:
        The data, and the folder of the tokenizer.

    Raises:
        UserError: on every rank, if the machines have different data; see also `write_tokens`.
    """
    local_rank = pgm.process_group_manager.local_rank

    def tokenise() -> tuple[TokenisedData, str, str] | None:
        if local_rank > 0:
            return None
        data = write_tokens(config, model_config)
        return data, checksums(data.arrays) + checksums(data.tokenizer), platform.node()

    # A separate group with a long timeout, because tokenising may take longer than the default timeout of collectives.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    try:
        found = run_on_all_ranks(tokenise, group)
    finally:
        dist.destroy_process_group(group)
    hosts = {digest: host for _, digest, host in filter(None, found)}
    if len(hosts) > 1:
        raise UserError(
            f"{' and '.join(hosts.values())} have different tokens or tokenizers for dataset.name="
            f"{config.dataset.name!r}; copy the same data and tokenizer to all machines"
        )
    of_machine = found[dist.get_rank() - local_rank]  # whose ranks are consecutive
    assert of_machine is not None
    data, *_ = of_machine
    return read_arrays(config, data), data.tokenizer


def read_arrays(config: Config, data: TokenisedData) -> Text | Samples:
    """Memory-map the arrays of a data set."""
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in data.arrays.glob("*.npy")}
    if config.dataset.has_samples:
        return Samples(**arrays)
    return Text(arrays["tokens"], data.end if config.dataset.masks_documents else None)


class ArrayFile:
    """A one-dimensional array in an .npy file, written part by part."""

    def __init__(self, path: Path, dtype: type) -> None:
        self.dtype, self.count = dtype, 0
        self.file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._write_header()
        self.start = self.file.tell()

    def _write_header(self) -> None:
        header = {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype
        self.file.write(values.tobytes())
        self.count += len(values)

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Write the final header, which has the same size, because numpy leaves room in it for any number of items."""
        with self.file:
            self.file.seek(0)
            self._write_header()
            assert self.file.tell() == self.start
