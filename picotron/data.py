"""Tokens -> micro-batches.

Window i of the stream of tokens is one training sequence: seq_length inputs and, one token further, as many targets.
Which window is global sample number s depends on the seed alone, so a position in the data is one integer, in every
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
    """How far a run has come: steps, tokens it was trained on, and the position in the data (samples)."""

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


def data_fingerprint(tokens: np.ndarray, config: Config) -> str:
    """A name for the sequence of all samples: where it is the same, so is sample number n."""
    training = config.training
    rules = (len(tokens), training.seq_length, training.seed if config.dataset.shuffle else "in order")
    ends = np.concatenate((tokens[:1000], tokens[-1000:])).astype(np.int64)
    return hashlib.sha256(repr(rules).encode() + ends.tobytes()).hexdigest()[:24]


def split_train_eval(tokens: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cut the stream into what is trained on and what is evaluated: the last `eval_steps` global batches.

    Raises:
        UserError: there are too few tokens for that, and for one global batch to train on.
    """
    length, batch, held_out = config.training.seq_length, config.global_batch_size, config.held_out_sequences
    windows = len(SequenceDataset(tokens, length))
    if windows < batch + held_out:
        evaluation, fewer = (f" and evaluation {held_out}", ", or fewer eval_steps") if held_out else ("", "")
        raise UserError(
            f"{config.dataset.name} has {len(tokens):,} tokens, that is {windows} sequences of {length}; one global batch "
            f"needs {batch}{evaluation}: use more data, a shorter seq_length or a smaller batch{fewer}"
        )
    logger.info(
        "%s tokens of %s, %s of them to evaluate", f"{len(tokens):,}", config.dataset.name, f"{held_out * length:,}"
    )
    start = len(tokens) - 1 - held_out * length
    return tokens[: start + 1], tokens[start:]  # the token they share is a target in the one, an input in the other


class MicroBatchDataLoader:
    """An endless iterator over this rank's micro-batches.

    Row b of micro-batch i at step s on dp_rank is global sample
    start + s * G + (i * dp_size + dp_rank) * micro_batch_size + b, where G is global_batch_size; sample n is window
    number n % windows of epoch n // windows. A batch is a dict of `input_ids`, `target_ids` and `position_ids`,
    (B, T / cp_size) for the positions that this cp rank has, on the device, and `hidden_states` (None).

    Args:
        tokens: the stream, see `load_tokens`.
        config: of the run.
        device: where batches go.
        start: the sample to begin with.
        shuffle: a seeded order, another one in every epoch; by default as the config says.
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
        self.windows = SequenceDataset(tokens, training.seq_length)
        self.device = device
        layout = config.distributed
        positions = local_positions(training.seq_length, layout.cp_size, grid.cp_rank, layout.cp_sharding)
        self.positions = positions.to(device)
        self.position_ids = self.positions.expand(self.micro_batch_size, -1)
        loader = DataLoader(
            self.windows,
            batch_sampler=self._rows(start),
            num_workers=config.dataset.num_workers,
            worker_init_fn=ignore_stop_signals,
            pin_memory=device.type == "cuda",  # so that the copy to the GPU does not hold up the CPU
        )
        # The only reference, so that clearing it ends the loader's processes. When Python exits it would send them a
        # SIGTERM, which they ignore, and wait for ever.
        self.batches = [iter(loader)]
        weakref.finalize(self, self.batches.clear)

    def _rows(self, start: int) -> Iterator[list[int]]:
        """The windows of this rank's micro-batches from sample `start` on, without end."""
        epoch, order = -1, np.arange(len(self.windows))
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
        window = next(self.batches[0]).to(self.device, non_blocking=True)  # (B, T + 1)
        return {
            "input_ids": window[:, self.positions],
            "target_ids": window[:, self.positions + 1],
            "position_ids": self.position_ids,
            "hidden_states": None,
        }
