"""Micro-batches from a stream of tokens.

The stream is cut into sequences of seq_length inputs and, shifted by one token, as many targets. The order of the
sequences depends only on the seed, so a position in the data is a single integer, the global sample number, in every
layout.
"""

import dataclasses
import hashlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from picotron import process_group_manager as pgm
from picotron.config import Config, Training
from picotron.context_parallel.positions import local_positions
from picotron.errors import UserError
from picotron.launch import ignore_stop_signals

logger = logging.getLogger("picotron")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run: completed steps, tokens trained on, and the position in the data, in samples."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def after_step(self, config: Config) -> "Progress":
        batch = config.global_batch_size
        return Progress(self.step + 1, self.tokens + batch * config.training.seq_length, self.samples + batch)

    def is_end(self, training: Training) -> bool:
        enough = training.max_tokens is not None and self.tokens >= training.max_tokens
        return enough or self.step >= training.total_train_steps


class SequenceDataset(Dataset[Tensor]):
    """The sequences of a token stream. Sequence i has seq_length + 1 tokens and starts at token i * seq_length, so
    consecutive sequences overlap by one token: the last target of one is the first input of the next.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self.tokens, self.seq_length = tokens, seq_length

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, i: int) -> Tensor:
        start = i * self.seq_length
        return torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))


def epoch_order(sequences: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of the sequences in an epoch, which depends on (seed, epoch) only: it is the argsort
    of raw PCG64 output, which is identical in all versions of numpy.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(sequences), kind="stable")


def data_fingerprint(tokens: np.ndarray, config: Config) -> str:
    """Return a hash of the length of the data, their first and last 1,000 tokens, and their order. Runs with different
    hashes read different samples; runs with equal hashes, almost certainly the same.
    """
    training = config.training
    rules = (len(tokens), training.seq_length, training.seed if config.dataset.shuffle else "in order")
    ends = np.concatenate((tokens[:1000], tokens[-1000:])).astype(np.int64)
    return hashlib.sha256(repr(rules).encode() + ends.tobytes()).hexdigest()[:24]


def split_train_eval(tokens: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Split the stream into training tokens and evaluation tokens, which are the last `eval_steps` global batches.

    Raises:
        UserError: the stream is shorter than the evaluation tokens and one global batch of training tokens.
    """
    length, batch, held_out = config.training.seq_length, config.global_batch_size, config.held_out_sequences
    sequences = len(SequenceDataset(tokens, length))
    if sequences < batch + held_out:
        evaluation, fewer = (f" and evaluation {held_out}", ", or fewer eval_steps") if held_out else ("", "")
        raise UserError(
            f"{config.dataset.name} has {len(tokens):,} tokens, enough for {sequences} sequences of {length} tokens, but one "
            f"global batch needs {batch}{evaluation}; use more data, a shorter seq_length or a smaller batch{fewer}"
        )
    logger.info(
        "%s tokens in %s, %s of them for evaluation", f"{len(tokens):,}", config.dataset.name, f"{held_out * length:,}"
    )
    start = len(tokens) - 1 - held_out * length
    return tokens[: start + 1], tokens[
        start:
    ]  # the shared token is the last target of one, the first input of the other


class MicroBatchDataLoader:
    """An endless iterator over this rank's micro-batches.

    Row b of micro-batch i at step s on dp_rank is global sample
    start + s * G + (i * dp_size + dp_rank) * micro_batch_size + b, where G is global_batch_size. If the stream has S
    sequences, sample n is number n % S in the order of epoch n // S.

    A micro-batch is a dict of `input_ids`, `target_ids` and `position_ids`, each (B, T/cp) for the positions that this
    cp rank holds, on the device, and `hidden_states` (None).

    Args:
        tokens: the token stream, see `load_tokens`.
        config: the run's config.
        device: device of the micro-batches.
        start: number of the first sample.
        shuffle: whether to use a seeded order, different in every epoch; by default as in the config.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        config: Config,
        device: torch.device,
        start: int = 0,
        shuffle: bool | None = None,
    ) -> None:
        training, grid = config.training, pgm.process_group_manager
        self.grad_acc_steps = training.gradient_accumulation_steps
        self.micro_batch_size = training.micro_batch_size
        self.global_batch_size = config.global_batch_size
        self.dp_rank, self.dp_size = grid.dp_rank, grid.dp_world_size
        self.seed, self.shuffle = training.seed, config.dataset.shuffle if shuffle is None else shuffle
        self.sequences = SequenceDataset(tokens, training.seq_length)
        self.device = device
        layout = config.distributed
        positions = local_positions(training.seq_length, layout.cp_size, grid.cp_rank, layout.cp_sharding)
        self.positions = positions.to(device)
        self.position_ids = self.positions.expand(self.micro_batch_size, -1)
        loader = DataLoader(
            self.sequences,
            batch_sampler=self._rows(start),
            num_workers=config.dataset.num_workers,
            # Forked workers share the memory-mapped tokens; other start methods would copy them to each worker.
            multiprocessing_context="fork" if config.dataset.num_workers else None,
            worker_init_fn=ignore_stop_signals,
            pin_memory=device.type == "cuda",  # so that the CPU does not wait for copies to the GPU
        )
        # The only reference to the iterator, so that clearing the list ends the loader's processes. Processes
        # that still run at exit would get SIGTERM from Python, which they ignore, and Python would wait forever.
        self.batches = [iter(loader)]
        weakref.finalize(self, self.batches.clear)

    def _rows(self, start: int) -> Iterator[list[int]]:
        """Yield the sequence numbers of each of this rank's micro-batches, from sample `start` on, endlessly."""
        epoch, order = -1, np.arange(len(self.sequences))
        while True:
            for i in range(self.grad_acc_steps):
                first = start + (i * self.dp_size + self.dp_rank) * self.micro_batch_size
                rows = []
                for sample in range(first, first + self.micro_batch_size):
                    if self.shuffle and sample // len(order) != epoch:
                        epoch = sample // len(order)
                        order = epoch_order(len(order), self.seed, epoch)
                    rows.append(int(order[sample % len(order)]))
                yield rows
            start += self.global_batch_size

    def __iter__(self) -> "MicroBatchDataLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        tokens = next(self.batches[0]).to(self.device, non_blocking=True)  # (B, T + 1)
        return {
            "input_ids": tokens[:, self.positions],  # (B, T/cp)
            "target_ids": tokens[:, self.positions + 1],
            "position_ids": self.position_ids,
            "hidden_states": None,
        }
