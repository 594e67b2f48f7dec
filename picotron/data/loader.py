"""Micro-batches from rows of tokens.

A row has seq_length inputs and, shifted by one token, as many targets. The order of the rows depends only on the seed,
so a position in the data is a single integer, the global sample number, in every layout.
"""

import hashlib
import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.console import UserError
from picotron.context_parallel.positions import local_positions
from picotron.data.rows import Rows, Samples, Text, TextRows, pack_samples
from picotron.run.launch import ignore_stop_signals

logger = logging.getLogger("picotron")


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of the rows in an epoch, which depends on (seed, epoch) only: it is the argsort of raw
    PCG64 output, which is identical in all versions of numpy.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(rows), kind="stable")


def data_fingerprint(rows: Rows, config: Config) -> str:
    """Return a hash of the size of the data, their first and last 1,000 tokens, and their order. Runs with different
    hashes read different rows; runs with equal hashes, almost certainly the same.
    """
    training, (size, ends) = config.training, rows.identity()
    rules = (size, training.seq_length, training.seed if config.dataset.shuffle else "in order")
    return hashlib.sha256(repr(rules).encode() + ends.astype(np.int64).tobytes()).hexdigest()[:24]


def rows_to_hold_out(data: Text | Samples, config: Config, earlier: tuple[int, str] | None) -> int:
    """Return the number of rows at the end of the data that are not trained on: as many as an evaluation reads, or if
    the run continues on the data of an earlier one, as many as that one has held out, because the order of the training
    rows depends on their number.

    Args:
        earlier: number of rows that an earlier run has held out, and the fingerprint of its training rows.
    """
    needed = config.held_out_sequences
    if earlier is None or earlier[0] == needed:
        return needed
    held_out, fingerprint = earlier
    training, *_ = _split(data, config, held_out)
    if not len(training) or data_fingerprint(training, config) != fingerprint:  # other data
        return needed
    if needed > held_out:
        logger.warning(
            "an evaluation reads %d sequences, but this run has held out only %d, and trains on the others; use fewer "
            "eval_steps to avoid this",
            needed,
            held_out,
        )
    return held_out


def split_train_eval(data: Text | Samples, config: Config, held_out: int | None = None) -> tuple[Rows, Rows]:
    """Make rows of the data, and split them into training rows and evaluation rows.

    Args:
        held_out: number of rows at the end of the data that are not trained on, see `rows_to_hold_out`; by default as
            many as an evaluation reads.

    Raises:
        UserError: there are fewer rows than evaluation and one global batch need.
    """
    name, length, evaluated = config.dataset.title, config.training.seq_length, config.held_out_sequences
    training, evaluation, size, dropped, summary = _split(data, config, evaluated if held_out is None else held_out)
    change = "a longer seq_length" if dropped else "a shorter seq_length"
    count, batch = len(training) + len(evaluation), config.global_batch_size
    if count < batch + evaluated:
        also, fewer = (f" and evaluation {evaluated}", ", or fewer eval_steps") if evaluated else ("", "")
        raise UserError(
            f"{name} has {size}, enough for {count} sequences of {length} tokens, but one global batch needs "
            f"{batch}{also}; use more data, {change} or a smaller batch{fewer}"
        )
    logger.info("%s", summary)
    return training, evaluation


def _split(data: Text | Samples, config: Config, held_out: int) -> tuple[Rows, Rows, str, int, str]:
    """Return training rows, evaluation rows, the size of the data in words, the number of samples that are in no row,
    and a sentence about all of it.
    """
    name, length, evaluated = config.dataset.title, config.training.seq_length, config.held_out_sequences
    if isinstance(data, Text):
        end, start = (max(0, len(data.tokens) - 1 - count * length) for count in (held_out, evaluated))
        # Where both meet, the shared token is the last target of one, the first input of the other.
        parts = data.tokens[: end + 1], data.tokens[start : start + evaluated * length + 1]
        size = f"{len(data.tokens):,} tokens"
        summary = f"{size} in {name}, {evaluated * length:,} of them for evaluation"
        return TextRows(parts[0], length, data.end), TextRows(parts[1], length, data.end), size, 0, summary
    drops_long, masks = config.dataset.long_samples == "drop", config.dataset.masks_documents
    packed = pack_samples(data, length, held_out, drops_long, masks)
    if held_out != evaluated:
        packed = packed._replace(evaluation=pack_samples(data, length, evaluated, drops_long, masks).evaluation)
    size = f"{len(data.lengths):,} samples"
    summary = (
        f"{size} in {name}, {packed.cut:,} cut and {packed.dropped:,} dropped; "
        f"{len(packed.training) + len(packed.evaluation):,} rows of {length:,} tokens, {packed.empty:.1%} empty, "
        f"{evaluated:,} of them for evaluation"
    )
    if packed.dropped:
        too_long = ", or they are longer" if drops_long else ""
        size += f", {packed.dropped:,} of them dropped (the loss counts none of their first {length + 1:,} tokens{too_long})"
    return packed.training, packed.evaluation, size, packed.dropped, summary


class MicroBatches(Dataset[dict[str, Tensor]]):
    """This rank's share of micro-batches, on the CPU. An index is the numbers of a micro-batch's rows, and the weight
    of each counted target.

    Args:
        positions: the positions of a row that this cp rank holds.
    """

    def __init__(self, rows: Rows, positions: Tensor) -> None:
        self.rows, self.positions = rows, positions

    def __getitem__(self, index: tuple[np.ndarray, float]) -> dict[str, Tensor]:
        numbers, weight = index
        input_ids, target_ids, counted, documents = zip(*(self.rows[int(i)] for i in numbers), strict=True)
        batch = {"input_ids": self.local(input_ids), "target_ids": self.local(target_ids)}
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
        """(B, T) -> (B, T/cp)"""
        return torch.from_numpy(np.stack(rows).astype(np.int64))[:, self.positions]


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
        loader = DataLoader(
            MicroBatches(rows, positions),
            batch_size=None,
            # not a method: the iterator would refer to this loader, which would then never be freed
            sampler=micro_batch_samples(rows, samples, grid.dp_rank, grid.cp_world_size, seed),
            num_workers=config.dataset.num_workers,
            # Forked workers share the memory-mapped tokens; other start methods would copy them to each worker.
            multiprocessing_context="fork" if config.dataset.num_workers else None,
            worker_init_fn=ignore_stop_signals,
            pin_memory=device.type == "cuda",  # so that the CPU does not wait for copies to the GPU
        )
        # The only reference to the iterator, so that clearing the list ends the loader's processes. Processes
        # that still run at exit would get SIGTERM from Python, which they ignore, and Python would wait forever.
        self.iterators = [iter(loader)]
        weakref.finalize(self, self.iterators.clear)

    def __iter__(self) -> "MicroBatchDataLoader":
        return self

    def __next__(self) -> dict[str, Any]:
        batch: dict[str, Any] = {"position_ids": self.position_ids, "hidden_states": None}
        for name, tensor in next(self.iterators[0]).items():
            batch[name] = tensor if name == "cu_seqlens" else tensor.to(self.device, non_blocking=True)
        return batch


class BatchList:
    """A data loader of micro-batches in a list, for one step."""

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self.batches, self.grad_acc_steps = iter(batches), len(batches)

    def __next__(self) -> dict[str, Any]:
        return next(self.batches)
