"""Text -> tokens: the documents of a data set are tokenised once, into one long stream of tokens on disk."""

import datetime
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.errors import UserError, first_line
from picotron.files import create
from picotron.hub import connect
from picotron.launch import ignore_stop_signals
from picotron.text.cache import cached, checksums
from picotron.text.document_files import Block, Piece
from picotron.text.documents import Documents, load_documents

logger = logging.getLogger("picotron")

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


class TokenisedBlocks(Dataset[np.ndarray | UserError]):
    """The tokens of each batch of blocks. The end-of-sequence token follows each document, if the tokenizer has one.

    A UserError is returned as an item, because a loader adds a traceback to an error that a worker raises.
    """

    def __init__(
        self, documents: Documents, batches: list[list[Block]], tokenizer: PreTrainedTokenizerBase, dtype: type
    ) -> None:
        self.read, self.batches, self.tokenizer, self.dtype = documents.read, batches, tokenizer, dtype
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> np.ndarray | UserError:
        options = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}
        tokens: list[np.ndarray] = [np.array([], self.dtype)]
        pieces = (piece for block in self.batches[i] for piece in self.read(block) if piece.text)
        try:
            while batch := _next_batch(pieces):
                ids = self.tokenizer([piece.text for piece in batch], **options)["input_ids"]
                tokens += [
                    np.array(those + self.end if piece.ends_document else those, self.dtype)
                    for piece, those in zip(batch, ids, strict=True)
                ]
        except UserError as error:
            return error
        return np.concatenate(tokens)


def _next_batch(pieces: Iterator[Piece]) -> list[Piece]:
    """Return the next pieces, with at least BATCH_BYTES characters in total unless they are the last ones. (A block of
    a parquet file can have many more.)
    """
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
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


def _write_tokens(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, processes: int, dtype: type, path: Path
) -> None:
    """Write the tokens of all documents to one .npy file."""
    batches = _in_batches(documents.blocks)
    loader = DataLoader(
        TokenisedBlocks(documents, batches, tokenizer, dtype),
        batch_size=None,
        collate_fn=lambda tokens: tokens,  # not as tensors, which would need shared memory
        num_workers=processes if processes > 1 else 0,
        multiprocessing_context="fork" if processes > 1 else None,
        worker_init_fn=_start_worker,
    )
    size = sum(block.size for block in documents.blocks)
    progress = tqdm(total=size, unit="B", unit_scale=True, desc="Tokenising", mininterval=1)
    with open(path, "wb", opener=create) as file, progress:
        # numpy leaves room in a header for any number of items, so the final header has the same size.
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (0,)}
        np.lib.format.write_array_header_1_0(file, header)
        start, count = file.tell(), 0
        for batch, tokens in zip(batches, loader, strict=True):
            if isinstance(tokens, UserError):
                raise tokens
            file.write(tokens.tobytes())
            count += len(tokens)
            progress.update(sum(block.size for block in batch))
        if count == 0:
            raise UserError(f"dataset.name={documents.name!r} has no text; choose other data")
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
        assert file.tell() == start


def write_tokens(config: Config, model_config: LlamaConfig) -> tuple[Path, Path]:
    """Tokenise the data set, unless its tokens are in the cache.

    Returns:
        The paths of the stream of tokens, an .npy file, and of the tokenizer's folder, both in the cache.

    Raises:
        UserError: see `load_documents` and `load_tokenizer`.
    """
    documents = load_documents(config.dataset, config.training.num_samples)
    tokenizer = load_tokenizer(config, model_config, documents)
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    dtype = np.uint16 if model_config.vocab_size <= 2**16 else np.uint32
    key = repr((documents.key, rules, tokenizer.eos_token_id, dtype.__name__))
    name = "tokens.npy"
    folder = cached(
        "tokens", key, lambda new: _write_tokens(documents, tokenizer, config.dataset.num_proc, dtype, new / name)
    )
    key = f"{rules} {json.dumps(tokenizer.init_kwargs, default=str, sort_keys=True)}"
    return folder / name, cached("tokenizer", key, lambda new: tokenizer.save_pretrained(new))


def load_tokens(config: Config, model_config: LlamaConfig) -> tuple[np.ndarray, Path]:
    """Load the data set as one memory-mapped stream of tokens. One process per machine tokenises it, if necessary, and
    the others wait.

    Returns:
        The tokens, and the folder of the tokenizer.

    Raises:
        UserError: the machines have different data; see also `load_documents` and `load_tokenizer`.
    """
    local_rank = pgm.process_group_manager.local_rank
    mine = None
    if local_rank == 0:
        tokens, tokenizer = write_tokens(config, model_config)
        mine = tokens, tokenizer, checksums(tokens.parent) + checksums(tokenizer), platform.node()
    found: list[Any] = [None] * dist.get_world_size()
    # A separate group with a long timeout, because tokenising may take longer than the default timeout of collectives.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    dist.all_gather_object(found, mine, group=group)
    dist.destroy_process_group(group)
    hosts = {digest: host for _, _, digest, host in filter(None, found)}
    if len(hosts) > 1:
        raise UserError(
            f"{' and '.join(hosts.values())} have different tokens or tokenizers for dataset.name="
            f"{config.dataset.name!r}; copy the same data and tokenizer to all machines"
        )
    tokens, tokenizer, _, _ = found[dist.get_rank() - local_rank]  # of this machine, whose ranks are consecutive
    return np.load(tokens, mmap_mode="r"), tokenizer
