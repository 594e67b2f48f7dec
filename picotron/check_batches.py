"""Checks of users' batches before a step starts. Every rank raises the same error."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.errors import UserError
from picotron.pipeline_parallel.executor import Executor

Batch = dict[str, Any]
PER_TOKEN = ("target_ids", "position_ids", "target_weights")  # tensors of the shape of `input_ids`


def check_batches(step: Callable[..., Tensor], batches: Sequence[Batch]) -> None:
    """Raise UserError if micro-batches do not fit a step, see `make_train_step` and `make_evaluation`."""
    if not batches:
        raise UserError("there are no micro-batches; pass at least one")
    for i, batch in enumerate(batches):
        if missing := [name for name in ("input_ids", "position_ids") if not isinstance(batch.get(name), Tensor)]:
            raise UserError(f"micro-batch {i} has no tensor {missing[0]!r}; add one, or use split_batch")
        shape = list(batch["input_ids"].shape)
        if len(shape) != 2:
            raise UserError(f"micro-batch {i}: input_ids have shape {shape}, but they must be (B, T)")
        for name in PER_TOKEN:
            if name in batch and list(batch[name].shape) != shape:
                found = list(batch[name].shape)
                raise UserError(f"micro-batch {i}: {name} have shape {found}, but input_ids {shape}; make them equal")
        if batch.get("cu_seqlens") is not None:
            _check_boundaries(batch["cu_seqlens"], shape[0], shape[1], f"micro-batch {i}: ")
        if ("target_weights" in batch) != ("target_weights" in batches[0]):
            raise UserError(f"only one of the micro-batches 0 and {i} has target_weights; add them to all or none")
    _check_pipeline(step, batches)


def _check_pipeline(step: Any, batches: Sequence[Batch]) -> None:
    """Check the shape of a pipeline's messages, and the number of micro-batches of a schedule."""
    grid = pgm.process_group_manager
    if grid.pp_world_size == 1:
        return
    B, T, _ = step.keywords["tensor_shapes"]
    for i, batch in enumerate(batches):
        sequences, tokens = batch["input_ids"].shape
        if sequences != B or tokens not in (
            T,
            T * grid.tp_world_size,
        ):  # with sequence parallelism, T is that of a shard
            raise UserError(
                f"micro-batch {i} has {sequences} sequences of {tokens} tokens, but this pipeline sends hidden states of "
                f"[{B}, {T}, D]; set micro_batch_size and seq_length to the shape of your batches"
            )
    if isinstance(step.func, Executor):
        step.func.check_micro_batches(len(batches))


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
    chunks = grid.cp_world_size * (2 if cp_sharding == "zigzag" and grid.cp_world_size > 1 else 1)
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
