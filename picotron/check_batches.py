"""Checks of users' batches before a step starts. Every rank raises the same error."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.collectives import run_on_all_ranks
from picotron.console import UserError
from picotron.context_parallel.positions import chunk_count
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.llama import IGNORE_INDEX, Llama
from picotron.parallelize import unwrap
from picotron.pipeline_parallel.executor import check_micro_batches
from picotron.train_step import Step

Batch = dict[str, Any]
PER_TOKEN = ("target_ids", "position_ids", "target_weights")  # tensors of the shape of `input_ids`
SHARED = ("input_ids", *PER_TOKEN, "cu_seqlens")  # tensors that must be equal on all ranks of a pipeline


class RankBatches(NamedTuple):
    """Facts about a rank's micro-batches that the other ranks check."""

    place: tuple[int, int]  # dp and cp rank: ranks at the same place process the same tokens
    ignores: bool  # whether a target is IGNORE_INDEX
    sizes: set[int]  # numbers of tokens of its micro-batches
    digests: list[dict[str, str]]  # of the shared tensors of each micro-batch, by name


def check_batches(step: Step, model: DataParallel, batches: Sequence[Batch]) -> bool:
    """Check micro-batches before a step, see `make_train_step` and `make_evaluation`.

    Returns:
        Whether a mean over all targets needs weights: a target of any rank is IGNORE_INDEX, or micro-batches differ in
        their number of tokens.

    Raises:
        UserError: on every rank, if the micro-batches of any rank do not fit the step or the model, or if two ranks of
            a pipeline or a tp group have different ones.
    """
    everyone = run_on_all_ranks(lambda: _check_rank(step, unwrap(model), batches))
    first_at: dict[tuple[int, int], tuple[int, list[dict[str, str]]]] = {}
    for rank, (place, _, _, digests) in enumerate(everyone):
        if len(digests) != (count := len(everyone[0].digests)):
            raise UserError(
                f"rank 0 has {count} micro-batches, but rank {rank} has {len(digests)}; pass the same number on all ranks"
            )
        if ("target_weights" in digests[0]) != ("target_weights" in everyone[0].digests[0]):
            raise UserError(f"only one of the ranks 0 and {rank} has target_weights; add them on all ranks or on none")
        first, expected = first_at.setdefault(place, (rank, digests))
        for i, (mine, theirs) in enumerate(zip(digests, expected, strict=True)):
            if different := [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]:
                raise UserError(
                    f"{min(different)} of micro-batch {i} differ between ranks {first} and {rank}, which process the same "
                    f"tokens; pass the same micro-batches to all pipeline and tensor-parallel ranks"
                )
    return any(each.ignores for each in everyone) or len(set().union(*(each.sizes for each in everyone))) > 1


def _check_rank(step: Step, llama: Llama, batches: Sequence[Batch]) -> RankBatches:
    """Check this rank's micro-batches."""
    if not batches:
        raise UserError("there are no micro-batches; pass at least one")
    ignores = False
    for i, batch in enumerate(batches):
        if missing := [name for name in ("input_ids", "position_ids") if not isinstance(batch.get(name), Tensor)]:
            raise UserError(f"micro-batch {i} has no tensor {missing[0]!r}; add one, or use split_batch")
        shape = list(batch["input_ids"].shape)
        if len(shape) != 2 or 0 in shape:
            raise UserError(f"micro-batch {i}: input_ids have shape {shape}, but they must be (B, T)")
        for name in PER_TOKEN:
            if name in batch and list(batch[name].shape) != shape:
                found = list(batch[name].shape)
                raise UserError(f"micro-batch {i}: {name} have shape {found}, but input_ids {shape}; make them equal")
        if batch.get("cu_seqlens") is not None:
            _check_boundaries(batch["cu_seqlens"], shape[0], shape[1], f"micro-batch {i}: ")
        if ("target_weights" in batch) != ("target_weights" in batches[0]):
            raise UserError(f"only one of the micro-batches 0 and {i} has target_weights; add them to all or none")
        _check_ids(batch["input_ids"], "input_ids", llama.config.vocab_size, i)
        if "target_ids" in batch:
            ignored = batch["target_ids"] == IGNORE_INDEX
            counted = ~ignored & (batch["target_weights"] != 0) if "target_weights" in batch else ~ignored
            _check_ids(batch["target_ids"][counted], "target_ids", llama.config.vocab_size, i)
            ignores |= bool(ignored.any())
    _check_lengths(step, llama, batches)
    grid = pgm.process_group_manager
    digests = [
        {name: _digest(batch[name]) for name in SHARED if isinstance(batch.get(name), Tensor)} for batch in batches
    ]
    sizes = {batch["input_ids"].numel() for batch in batches}
    return RankBatches((grid.dp_rank, grid.cp_rank), ignores, sizes, digests)


def _check_ids(ids: Tensor, name: str, vocab_size: int, i: int) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise UserError(
            f"micro-batch {i}: {name} have dtype {ids.dtype}, but ids are integers; convert them to torch.int64"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        ignored = f", or {IGNORE_INDEX} for a target that does not count" if name == "target_ids" else ""
        raise UserError(
            f"micro-batch {i}: {name} have {outside[0].item()}, but the model's vocab_size is {vocab_size}; use ids from 0 to "
            f"{vocab_size - 1}{ignored}"
        )


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's values."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()


def _check_lengths(step: Step, llama: Llama, batches: Sequence[Batch]) -> None:
    """Check the lengths for sequence parallelism, and the number of micro-batches of a schedule."""
    grid = pgm.process_group_manager
    is_sharded = any(getattr(module, "sequence_parallel", False) for module in llama.modules())
    shards = grid.tp_world_size if is_sharded else 1
    for i, batch in enumerate(batches):
        tokens = batch["input_ids"].size(1)
        if tokens % shards:
            raise UserError(
                f"micro-batch {i} has {tokens} tokens per sequence on a context-parallel rank, which sequence parallelism cannot "
                f"divide over {shards} tensor-parallel ranks; use a multiple of {shards}"
            )
    if step.micro_batches is not None:
        check_micro_batches(step.micro_batches, len(batches))


def _check_boundaries(cu_seqlens: Tensor, sequences: int, tokens: int, where: str) -> None:
    """Check the boundaries of documents, of which a context-parallel rank has a part of the tokens."""
    length = tokens * pgm.process_group_manager.cp_world_size
    boundaries = torch.as_tensor(cu_seqlens).tolist()
    if (boundaries[:1], boundaries[-1:]) != ([0], [sequences * length]) or sorted(set(boundaries)) != boundaries:
        raise UserError(
            f"{where}cu_seqlens should ascend from 0 to {sequences * length}, the number of tokens of its rows, not "
            f"{str(boundaries)[:100]}"
        )
    if missing := [row * length for row in range(sequences) if row * length not in boundaries]:
        raise UserError(f"{where}cu_seqlens lack {missing[0]}, where a row begins; a document cannot cross rows")


def check_split(batch: Batch, micro_batches: int, cp_sharding: str) -> int:
    """Return the number of sequences of a micro-batch, see `split_batch`.

    Raises:
        UserError: the sequences or their tokens cannot be divided evenly.
    """
    grid = pgm.process_group_manager
    sequences, length = batch["input_ids"].shape
    parts = micro_batches * grid.dp_world_size
    if sequences % parts:
        raise UserError(
            f"{sequences} sequences cannot be divided into {micro_batches} micro-batches on each of {grid.dp_world_size} "
            f"data-parallel ranks; use a multiple of {parts}"
        )
    chunks = chunk_count(grid.cp_world_size, cp_sharding)
    if length % chunks:
        raise UserError(
            f"{length} tokens cannot be divided into {chunks} chunks for {grid.cp_world_size} context-parallel ranks with "
            f"cp_sharding={cp_sharding!r}; use a multiple of {chunks}"
        )
    for name, value in batch.items():
        if name != "cu_seqlens" and isinstance(value, Tensor) and value.ndim and len(value) != sequences:
            raise UserError(f"{name} has {len(value)} sequences, but input_ids {sequences}; make them equal")
    if batch.get("cu_seqlens") is not None:
        _check_boundaries(batch["cu_seqlens"], sequences, length // grid.cp_world_size, "")
    return sequences // parts
