"""Text -> tokens: a data set is tokenised once, into token files: the documents of a text into one long stream of
tokens, samples for fine-tuning into their tokens, lengths and a mask.
"""

import contextlib
import datetime
import json
import logging
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.console import UserError
from workbench.console import first_line
from workbench.files import parse_json
from workbench.prepare.cache import cached, sizes_of
from workbench.prepare.documents import Documents, Record, load_documents
from workbench.prepare.samples import SampleEncoder
from workbench.prepare.text import Columns, TextEncoder, pieces_of
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.hub import connect
from workbench.run.launch import end_with_launcher
from workbench.run.start_method import START_METHOD
from workbench.run.token_files import FILE, TokenFiles, check_end, digest_of

logger = logging.getLogger("picotron")
T = TypeVar("T")
Encoder = TextEncoder | SampleEncoder

VERSION = 7  # part of the keys of cached tokens; add 1 if the same data and tokenizer give other tokens than before
END_OF_TEXT = "<|endoftext|>"
BATCH_BYTES, BATCH_ITEMS = 2**20, 2**10  # of text that is tokenised at a time
SHOWN = 10  # number of broken records whose problems are reported
BPE_CHARACTERS = 2**28  # maximum number of characters to train a BPE on
PLACES = {  # keys of a tokenizer without an effect on the tokens of a text
    "name_or_path", "is_local", "local_files_only", "vocab_file", "merges_file", "chat_template",
}  # fmt: skip
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


def load_tokenizer(
    config: Config, model_config: PreTrainedConfig, documents: Documents, trained: Path | None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run. If `model.tokenizer` is "bpe", it is that of the checkpoint, because weights know
    the ids of one BPE only; without one, train it, unless it is in the cache.
    """
    if config.model.tokenizer == "bpe" and trained is None:
        if column := config.dataset.messages_column:
            raise UserError(
                f"dataset.messages_column={column!r} needs a tokenizer with a chat template, which model.tokenizer='bpe' "
                f"has not; choose another model.tokenizer"
            )

        def write(folder: Path) -> None:
            logger.info("training a byte-level BPE of %d tokens on %s", model_config.vocab_size, documents.name)
            save(train_bpe(_texts(documents, config.dataset.columns), model_config.vocab_size), folder)

        trained = cached("bpe", f"{documents.key} {model_config.vocab_size}", write)
    return read_tokenizer(config, model_config, trained if config.model.tokenizer == "bpe" else None, can_train=True)


def read_tokenizer(
    config: Config, model_config: PreTrainedConfig, folder: Path | None = None, can_train: bool = False
) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a run from a folder, by default that of the config, or from the hub.

    Args:
        can_train: whether the program trains a tokenizer if `model.tokenizer` is "bpe", see `load_tokenizer`.

    Raises:
        UserError: the tokenizer cannot be read, does not fit the model's family, or has more tokens than the model.
    """
    name = str(folder or config.model.tokenizer or config.model.name)
    choices = 'a hub id, a folder, or "bpe" to train one' if can_train else "a hub id or a folder"
    if name == "bpe":
        raise UserError(f"model.tokenizer='bpe' is for programs that train on text; set it to {choices}")
    try:
        if not os.path.isdir(name):
            connect(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        if "`tiktoken` is required" in str(error):  # what transformers tries last
            choices += ", or install sentencepiece, which reads a tokenizer.model"
        raise UserError(
            f"cannot load a tokenizer from {name!r} ({first_line(error)}); set model.tokenizer to {choices}"
        ) from None
    if (tokens := vocabulary_size(tokenizer)) > model_config.vocab_size:
        raise UserError(
            f"the tokenizer {name!r} has {tokens} tokens, but the model's vocab_size is {model_config.vocab_size}; "
            f"choose another model.tokenizer"
        )
    forget_this_process(tokenizer)
    return check_beside_model(tokenizer, config, model_config) if config.model.tokenizer else tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's highest token + 1: more than its length, if there are gaps."""
    size: int = max(tokenizer.get_vocab().values()) + 1
    return size


def forget_this_process(tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove what differs between processes that read the same tokenizer: whether they are offline, and the truncation
    and padding of earlier calls. So all machines have the same tokenizer.
    """
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()


def check_beside_model(
    tokenizer: PreTrainedTokenizerBase, config: Config, model_config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """Return the tokenizer. Raises a UserError if transformers would read another one from a checkpoint: beside some
    models, such as qwen2, it reads the family's class of tokenizer, whatever the tokenizer's files say.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            save(tokenizer, folder)
            model_config.save_pretrained(folder)
            try:
                is_same = _rules(AutoTokenizer.from_pretrained(folder)) == _rules(tokenizer)
                problem = "" if is_same else "as another tokenizer"
            except Exception as error:  # of many types
                problem = f"not at all ({first_line(error)})"
    except OSError as error:
        raise UserError(
            f"the folder for temporary files, {tempfile.tempdir}, cannot be written: {first_line(error)}; free some space, or "
            f"set TMPDIR to another folder"
        ) from None
    if problem:
        raise UserError(
            f"transformers would read model.tokenizer={config.model.tokenizer!r} from a checkpoint of a "
            f"{model_config.model_type!r} model {problem}; use a tokenizer of that family, or a model of another family"
        )
    return tokenizer


def save(tokenizer: PreTrainedTokenizerBase, folder: Path | str) -> None:
    """Write a tokenizer's files.

    Raises:
        OSError: they cannot be written. (The tokenizers library raises an Exception with the number of the error.)
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
        raise


def tokenizer_folder(tokenizer: PreTrainedTokenizerBase) -> Path:
    """Return a folder in the cache that has the tokenizer's files only."""
    return cached("tokenizer", _identity(tokenizer), lambda new: save(tokenizer, new))


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that differs between tokenizers whose files differ, or that encode texts differently."""
    options = {key: value for key, value in tokenizer.init_kwargs.items() if key not in PLACES}
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    changeable = tokenizer.chat_template, tokenizer.special_tokens_map  # also after the tokenizer was made
    state = type(tokenizer).__name__, vocabulary, tokenizer.split_special_tokens, options, changeable
    return json.dumps(state, default=str, sort_keys=True)


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return what determines how a tokenizer cuts texts, as values of JSON."""
    if not tokenizer.is_fast:
        return type(tokenizer).__name__, tokenizer.get_vocab()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: backend[key] for key in ("normalizer", "pre_tokenizer", "model", "post_processor")}


def _progress(documents: Documents, label: str, delay: float = 0) -> Any:
    return tqdm(total=documents.size, unit="B", unit_scale=True, desc=label, mininterval=1, delay=delay)


def _texts(documents: Documents, columns: Columns) -> Iterator[str]:
    """Yield the texts of all documents, in pieces."""
    with _progress(documents, "Reading", delay=3) as progress:  # a few seconds need no progress bar
        for record in documents.records():
            yield from (piece.text for piece in convert(record, lambda value: pieces_of(value, columns)))
            progress.update(record.size)


def convert(record: Record, function: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yield what a function makes of a record. Errors begin with the record's place."""
    value = record.value
    try:
        yield from function(parse_json(value, "the record") if isinstance(value, bytes) else value)
    except UserError as error:
        raise UserError(f"{record.place}: {error}") from None


def in_batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items, so that a tokenizer with several threads gets several texts: BATCH_ITEMS, or fewer if these have
    BATCH_BYTES in total.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_BYTES or len(batch) == BATCH_ITEMS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class Encoded(NamedTuple):
    """Parts of the arrays of some records, the approximate size of these in bytes, their number, the problems of those
    that cannot be used, whether the tokenizer itself cannot, and the number of those with each note of the encoder.
    """

    parts: list[dict[str, np.ndarray]]
    size: int
    records: int
    problems: list[str]
    is_tokenizer: bool
    notes: Counter[str]


class Encoding(Dataset[Encoded]):
    """Encodings of batches of records; a batch is its own index."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __getitem__(self, records: list[Record]) -> Encoded:
        encoder, parts, is_tokenizer = self.encoder, [], False
        encoder.notes.clear()
        problems: list[str] = []  # returned, because a loader adds a traceback to an error that a worker raises

        def items() -> Iterator[Any]:
            for record in records:
                try:
                    yield from filter(encoder.size, convert(record, encoder.convert))
                except UserError as error:
                    problems.extend(error.problems)

        try:  # a batch has more text than it should if records are compressed, or one is long
            parts = [encoder.encode(batch) for batch in in_batches(items(), encoder.size)]
        except UserError as error:
            problems.extend(error.problems)
            is_tokenizer = True
        size = sum(record.size for record in records)
        return Encoded(parts, size, len(records), problems, is_tokenizer, encoder.notes.copy())


def _as_they_are(parts: Any) -> Any:
    """Collate batches: not as tensors, which would need shared memory."""
    return parts


def _start_worker(_: int) -> None:
    """Initialise a process that tokenises. It ends with its parent, even while it is busy."""
    end_with_launcher()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process has none of the tokenizer's threads


def _broken(total: int, count: int, first: list[str]) -> str:
    """Return the message about records that cannot be used, with the problems of the first ones."""
    if count == 1:
        return first[0]
    if count == total:
        return f"{first[0]} (none of the {total:,} records that were read can be used)"
    lead = f"{count:,} of {total:,} records that were read cannot be used (dataset.skip_invalid leaves them out); the first:"
    return "\n  - ".join([lead, *first])


def _write_arrays(documents: Documents, encoder: Encoder, processes: int, skips: bool, folder: Path) -> None:
    """Write the arrays of all documents, each to one file, whose suffix is its dtype.

    Args:
        skips: whether records that cannot be used are left out.
    """
    loader = DataLoader(
        Encoding(encoder),
        batch_size=None,
        sampler=in_batches(documents.records(), lambda record: record.size),
        collate_fn=_as_they_are,
        num_workers=processes if processes > 1 else 0,
        multiprocessing_context=START_METHOD if processes > 1 else None,
        worker_init_fn=_start_worker,
    )
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(_progress(documents, "Tokenising"))
        paths = {name: folder / f"{name}.{np.dtype(dtype).name}" for name, dtype in encoder.dtypes.items()}
        files = {name: stack.enter_context(open(path, "wb")) for name, path in paths.items()}
        total, count, notes = 0, 0, Counter[str]()
        first: list[str] = []
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the parent, which ends the others
        try:
            encodings = iter(loader)  # starts processes, which inherit the mask
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for encoded in encodings:
            for name, values in (item for part in encoded.parts for item in part.items()):
                assert values.dtype == encoder.dtypes[name]
                files[name].write(values)
            progress.update(encoded.size)
            notes += encoded.notes
            total, count = total + encoded.records, count + len(encoded.problems)
            first = [*first, *encoded.problems][:SHOWN]
            skips = skips and not encoded.is_tokenizer
            if count == total >= SHOWN and not skips:  # as if a column has another name
                break
        if count and (count >= total or not skips):
            raise UserError(_broken(total, count, first))
        if count:
            logger.warning("%d of %d records cannot be used, and are left out; the first: %s", count, total, first[0])
        for note, records in notes.items():
            logger.warning("%s in %d of %d conversations", note, records, total)
        if files["tokens"].tell() == 0:
            raise UserError(f"dataset.name={documents.name!r} has no text, or none that counts; choose other data")
        progress.update((documents.size or progress.n) - progress.n)  # sizes of records are approximate


def write_tokens(config: Config, model_config: PreTrainedConfig, trained: Path | None = None) -> Path:
    """Tokenise the data set, unless its token files are in the cache. Returns their folder.

    Args:
        trained: see `prepare`.
    """
    section = config.dataset
    documents = load_documents(section, config.training.num_samples, config.training.seed)
    tokenizer = load_tokenizer(config, model_config, documents, trained)
    check_end(section, tokenizer.eos_token_id)
    dtype = np.uint16 if model_config.vocab_size <= 2**16 else np.uint32
    only_last, starts = section.assistant_turns == "last", section.add_start_token

    def write(folder: Path) -> None:
        columns = section.columns
        encoder: Encoder = TextEncoder(columns, tokenizer, dtype, starts)
        if section.has_samples:
            encoder = SampleEncoder(columns, tokenizer, dtype, only_last, starts)
        _write_arrays(documents, encoder, section.num_proc, section.skip_invalid, folder)
        save(tokenizer, folder / "tokenizer")
        facts = TokenFiles(
            end=tokenizer.eos_token_id,
            vocab_size=vocabulary_size(tokenizer),
            digest=digest_of(folder),
            sizes=sizes_of(folder),
        )
        (folder / FILE).write_text(facts.model_dump_json(indent=2) + "\n")

    key = VERSION, documents.key, _identity(tokenizer), dtype.__name__, only_last, starts, section.skip_invalid
    return cached("tokens", repr(key), write)


def prepare(config: Config, model_config: PreTrainedConfig, trained: Path | None = None) -> Path:
    """Tokenise the data set: one process per machine does it, if necessary, and the others wait. Every rank must call
    this.

    Args:
        trained: folder of the tokenizer with which the model was trained so far, which `model.tokenizer` "bpe" then
            means; None: train a BPE.

    Returns:
        The folder of the token files on this machine.
    """
    local_rank = pgm.process_group_manager.local_rank
    # A separate group with a long timeout, because tokenising may take longer than the default timeout of collectives.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    try:
        folders = run_on_all_ranks(lambda: None if local_rank else write_tokens(config, model_config, trained), group)
    finally:
        dist.destroy_process_group(group)
    folder = folders[dist.get_rank() - local_rank]  # of this machine, whose ranks are consecutive
    assert folder is not None
    return folder
