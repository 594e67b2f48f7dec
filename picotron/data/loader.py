"""Micro-batches from rows of tokens.

A row has seq_length inputs and, shifted by one token, as many targets. The order of the rows depends only on the seed,
so a position in the data is a single integer, the global sample number, in every layout.
"""

import abc
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.context_parallel.context_parallel import local_positions


class Row(NamedTuple):
    """T inputs and their targets.

    Args:
        input_ids, target_ids: (T,) tokens.
        counted: (T,) whether the loss counts a target, 0 or 1; None: it counts all.
        documents: lengths of the documents in the row, T in total, if documents are masked, else None.
    """

    input_ids: np.ndarray
    target_ids: np.ndarray
    counted: np.ndarray | None = None
    documents: np.ndarray | None = None


class Rows(abc.ABC):
    """The rows of a data set.

    Attributes:
        counts: number of targets that the loss counts in each row; None: it counts all.
    """

    counts: np.ndarray | None = None

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, i: int) -> Row: ...

    @abc.abstractmethod
    def identity(self) -> tuple[Any, np.ndarray]:
        """Return a value that changes with the size of the data, and the tokens at both ends."""


class TextRows(Rows):
    """The rows of a text, a stream of tokens. Row i starts at token i * seq_length, and its last target is the first
    input of row i + 1.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self.tokens, self.seq_length = tokens, seq_length

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, i: int) -> Row:
        tokens = self.tokens[i * self.seq_length : (i + 1) * self.seq_length + 1]
        return Row(tokens[:-1], tokens[1:])

    def identity(self) -> tuple[Any, np.ndarray]:
        return len(self.tokens), np.concatenate((self.tokens[:1000], self.tokens[-1000:]))


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of the rows in an epoch, which depends on (seed, epoch) only: it is the argsort of raw
    PCG64 output, which is identical in all versions of numpy.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(rows), kind="stable")


def micro_batch_samples(
    rows: Rows, samples: np.ndarray, dp_rank: int, cp: int, seed: int | None
) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the rows of each of a dp rank's micro-batches, endlessly, with the weight of its counted targets.

    Args:
        samples: numbers of the first step's samples, (micro-batches, dp_size, micro_batch_size).
        cp: number of cp ranks, which share a micro-batch.
        seed: seed of the orders of the epochs; None keeps the order of the rows.
    """
    epoch, order = -1, np.arange(len(rows))
    while True:
        epochs, numbers = np.divmod(samples, len(order))
        for number in np.unique(epochs):
            if seed is not None and number != epoch:
                epoch, order = number, epoch_order(len(order), seed, number)
            numbers[epochs == number] = order[numbers[epochs == number]]
        counted = 1 if rows.counts is None else rows.counts[numbers].sum()
        weight = samples.shape[0] * samples.shape[1] * cp / counted
        yield from ((micro_batch, weight) for micro_batch in numbers[:, dp_rank])
        samples = samples + samples.size


class MicroBatchDataLoader:
    """An endless iterator over this rank's micro-batches.

    Row b of micro-batch i at step s on dp_rank is global sample
    start + s * G + (i * dp_size + dp_rank) * micro_batch_size + b, where G is the number of rows of a step. If the data
    have S rows, sample n is number n % S in the order of epoch n // S.

    A micro-batch is a dict of

    - `input_ids`, `target_ids` and `position_ids`, each (B, T/cp) for the positions that this cp rank holds, on the
      device;
    - `hidden_states`, None;
    - `target_weights` (B, T/cp) in float64 on the device, if the rows are samples: 0 for targets that are not counted.
      The others have the same weight in all micro-batches of a step, such that the sum over a micro-batch of
      target_weights times losses, averaged over the micro-batches of a step and the dp and cp ranks, is the mean loss
      of all counted targets;
    - `cu_seqlens`, if documents are masked: (N + 1,) int32 on the CPU, the bounds of the N documents among the B T
      tokens of the unsharded rows.

    Args:
        rows: the rows, see `split_train_eval`.
        config: the run's config.
        device: device of the micro-batches.
        start: number of the first sample.
        shuffle: whether to use a seeded order, different in every epoch; by default as in the config.
        batches: number of global batches that a step reads, more than one in an evaluation.

    Attributes:
        grad_acc_steps: number of micro-batches of a step on each dp rank.
        micro_batch_size, global_batch_size: rows of a micro-batch, and of a step on all ranks.
    """

    def __init__(
        self,
        rows: Rows,
        config: Config,
        device: torch.device,
        start: int = 0,
        shuffle: bool | None = None,
        batches: int = 1,
    ) -> None:
        training, layout, grid = config.training, config.distributed, pgm.process_group_manager
        self.grad_acc_steps = batches * training.gradient_accumulation_steps
        self.micro_batch_size, self.global_batch_size = training.micro_batch_size, config.global_batch_size
        self.device, shuffle = device, config.dataset.shuffle if shuffle is None else shuffle
        positions = local_positions(training.seq_length, layout.cp_size, grid.cp_rank, layout.cp_sharding)
        self.position_ids = positions.to(device).expand(training.micro_batch_size, -1)
        shape = self.grad_acc_steps, grid.dp_world_size, training.micro_batch_size
        samples = start + np.arange(math.prod(shape)).reshape(shape)
        seed = training.seed if shuffle else None
        self.rows, self.positions = rows, positions
        self.numbers = micro_batch_samples(rows, samples, grid.dp_rank, grid.cp_world_size, seed)

    def __iter__(self) -> "MicroBatchDataLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        numbers, weight = next(self.numbers)
        input_ids, target_ids, counted, documents = zip(*(self.rows[int(i)] for i in numbers), strict=True)
        batch: dict[str, Any] = {"position_ids": self.position_ids, "hidden_states": None}
        batch |= {"input_ids": self.local(input_ids), "target_ids": self.local(target_ids)}
        if counted[0] is not None:
            batch["target_weights"] = self.local(counted).double() * weight
        if documents[0] is not None:
            lengths = np.concatenate(documents)
            ends = lengths.cumsum()
            position_ids = np.arange(ends[-1]) - (ends - lengths).repeat(lengths)
            batch["position_ids"] = self.local(position_ids.reshape(len(numbers), -1))
            batch["cu_seqlens"] = torch.from_numpy(np.append(0, ends).astype(np.int32))
        return batch

    def local(self, rows: Any) -> Tensor:
        """(B, T) -> (B, T/cp), on the device"""
        values = torch.from_numpy(np.stack(rows).astype(np.int64))[:, self.positions]
        if self.device.type == "cuda":
            values = values.pin_memory()  # so that the CPU does not wait for the copy
        return values.to(self.device, non_blocking=True)
