"""Checks of users' batches before a step, for mistakes that would hang the ranks or train wrongly without an error.
Every rank raises the same error. Wrong types and dtypes are left to torch, whose errors name them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.context_parallel.context_parallel import chunk_count
from picotron.data_parallel.data_parallel import DataParallel
from picotron.data_parallel.guards import guard_of
from picotron.model.cross_entropy import IGNORE_INDEX
from picotron.model.llama import Llama
from picotron.parallelize import unwrap
from workbench.pipelines.modules import sequence_shards
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.model_config import check_window

Batch = dict[str, Any]
PER_TOKEN = ("target_ids", "position_ids", "target_weights")  # tensors of the shape of `input_ids`
SHARED = ("input_ids", *PER_TOKEN)  # tensors that must be equal on all ranks of a pipeline
ROWS = ("the shape", "cu_seqlens")  # what must be equal on all ranks of a dp rank, of which each cp rank has a part


class RankBatches(NamedTuple):
    """Facts about a rank's micro-batches that the other ranks check."""

    place: tuple[int, int]  # dp and cp rank: ranks at the same place process the same tokens
    ignores: bool  # whether a target is IGNORE_INDEX
    sizes: set[int]  # numbers of tokens of its micro-batches
    facts: list[dict[str, str]]  # of each micro-batch: hashes of the shared tensors by name, and facts of ROWS


def check_batches(model: DataParallel, batches: Sequence[Batch], is_training: bool = False) -> bool:
    """Check micro-batches before a step.

    Args:
        is_training: whether the step runs backward, so that there must be no gradients yet.

    Returns:
        Whether a mean over all targets needs weights: a target of any rank is IGNORE_INDEX, or micro-batches differ in
        their number of tokens.

    Raises:
        UserError: on every rank, if the micro-batches of any rank do not fit the step or the model, or if two ranks of
            a pipeline or a tp group have different ones.
    """

    def check() -> RankBatches:
        if is_training:
            _check_parameters(model)
        return _check_rank(unwrap(model), batches)

    everyone = run_on_all_ranks(check)
    if len(counts := {len(each.facts) for each in everyone}) > 1 or 0 in counts:
        raise UserError(
            f"the ranks have {[len(each.facts) for each in everyone]} micro-batches; pass the same number on all ranks, "
            f"at least 1"
        )
    if len({"target_weights" in facts for each in everyone for facts in each.facts}) > 1:
        raise UserError("only some micro-batches have target_weights; add them to all or none, on all ranks")
    seen: dict[Any, tuple[int, str]] = {}  # the first rank at a place, and its fact
    for rank, mine in enumerate(everyone):
        for i, facts in enumerate(mine.facts):
            for name, fact in facts.items():
                place = mine.place[:1] if name in ROWS else mine.place
                first, expected = seen.setdefault((i, name, place), (rank, fact))
                if fact != expected:
                    raise UserError(
                        f"{name} of micro-batch {i} differs between ranks {first} and {rank}, which process parts of the "
                        f"same rows; pass the same micro-batches to all ranks of a data-parallel rank"
                    )
    return any(each.ignores for each in everyone) or len(set().union(*(each.sizes for each in everyone))) > 1


def _check_parameters(model: DataParallel) -> None:
    """Check that no parameter was frozen in an earlier step, and that all gradients are 0. Those of an earlier step are
    sums over ranks, which are taken once.
    """
    guard_of(model).check_trained()
    gradients = model.gradient_buffers()
    if gradients and torch.stack([gradient.any() for gradient in gradients]).any():
        raise UserError(
            "the gradients of an earlier train_batch are still there; call update_weights or optimizer.zero_grad before the "
            "next one, or pass all micro-batches to one train_batch"
        )


def _check_rank(llama: Llama, batches: Sequence[Batch]) -> RankBatches:
    """Check this rank's micro-batches."""
    ignores = False
    for i, batch in enumerate(batches):
        where = f"micro-batch {i}: "
        _check_input_ids(batch, where)
        ids = batch["input_ids"]
        if "position_ids" not in batch:
            raise UserError(f"{where}there are no position_ids; cut batches with trainer.split, or add them")
        for name in PER_TOKEN:  # a tensor of another shape could be broadcast, or have as many numbers in another order
            if name in batch and batch[name].shape != ids.shape:
                found, shape = list(batch[name].shape), list(ids.shape)
                raise UserError(f"{where}{name} have shape {found}, but input_ids {shape}; make them equal")
        _check_mask(batch.get("attention_mask"), where)
        _check_ids(ids, "input_ids", llama.config.vocab_size, where)
        if "target_ids" in batch:
            ignored = batch["target_ids"] == IGNORE_INDEX
            counted = ~ignored & (batch["target_weights"] != 0) if "target_weights" in batch else ~ignored
            _check_ids(batch["target_ids"][counted], "target_ids", llama.config.vocab_size, where)
            ignores |= bool(ignored.any())
        _check_documents(llama, batch, where)
        _check_sharding(llama, batch, i)
    grid = pgm.process_group_manager
    facts = [
        {"the shape": str([*batch["input_ids"].shape]), "cu_seqlens": "none"}
        | {name: _digest(batch[name]) for name in (*SHARED, "cu_seqlens") if batch.get(name) is not None}
        for batch in batches
    ]
    sizes = {batch["input_ids"].numel() for batch in batches}
    return RankBatches((grid.dp_rank, grid.cp_rank), ignores, sizes, facts)


def _check_input_ids(batch: Batch, where: str) -> None:
    """Check that there are tokens, as rows."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        found = (
            "none"
            if ids is None
            else f"{ids.dtype} {list(ids.shape)}"
            if isinstance(ids, Tensor)
            else type(ids).__name__
        )
        raise UserError(f"{where}input_ids should be a tensor of integers (B, T), but found {found}")


def _check_mask(mask: Any, where: str) -> None:
    """Check that an attention mask hides only padding at the end of rows, which causal attention never sees."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and (mask.long().diff(dim=1) > 0).any():
        raise UserError(
            f"{where}attention_mask hides tokens before others, but attention here is causal and has no mask; pad rows on "
            f"the right, or use pack_sequences"
        )


def _check_ids(ids: Tensor, name: str, vocab_size: int, where: str) -> None:
    """Check ids, of which tensor parallelism takes those outside the vocabulary for ids of other ranks."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        ignored = f", or {IGNORE_INDEX} for a target that does not count" if name == "target_ids" else ""
        raise UserError(
            f"{where}{name} have {outside[0].item()}, but the model's vocab_size is {vocab_size}; use ids from 0 to "
            f"{vocab_size - 1}{ignored}"
        )


def _check_documents(llama: Llama, batch: Batch, where: str) -> None:
    """Check the boundaries of documents, and that the model's window hides no token."""
    rows, tokens = batch["input_ids"].shape
    length = longest = tokens * pgm.process_group_manager.cp_world_size
    if batch.get("cu_seqlens") is not None:
        if batch["cu_seqlens"].is_floating_point():
            raise UserError(f"{where}cu_seqlens should be integers, not {batch['cu_seqlens'].dtype}")
        boundaries, ends = batch["cu_seqlens"].tolist(), (0, rows * length)
        with_rows = sorted({*boundaries, *range(0, ends[1] + 1, length)})
        if boundaries != with_rows or (boundaries[0], boundaries[-1]) != ends:
            raise UserError(
                f"{where}cu_seqlens should ascend from 0 to {ends[1]}, the number of tokens of its rows, and have each "
                f"multiple of {length}, because no document crosses rows, not {str(boundaries)[:100]}"
            )
        longest = int(batch["cu_seqlens"].diff().max())
    check_window(llama.config, longest, f"{where}a sequence of {longest} tokens")


def _check_sharding(llama: Llama, batch: Batch, i: int) -> None:
    """Check that the tokens can be sharded for sequence parallelism, and were split as the config says."""
    if (tokens := batch["input_ids"].size(1)) % (shards := sequence_shards(llama)):
        raise UserError(
            f"micro-batch {i} has rows of {tokens} tokens on this rank, which sequence_parallel divides over {shards} ranks; use a "
            f"multiple of {shards}"
        )
    sharding, other = llama.cp_sharding, batch.get("cp_sharding")  # a program may have positions of its own
    if None not in (sharding, other) and other != sharding:
        raise UserError(
            f"micro-batch {i} was split with cp_sharding={other!r}, but the config has {sharding!r}; pass "
            f"cp_sharding={sharding!r} to split_batch or pack_sequences"
        )


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's values."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()


def check_split(batch: Batch, micro_batches: int, cp_sharding: str) -> int:
    """Return the number of sequences of a micro-batch, see `split_batch`.

    Raises:
        UserError: the sequences or their tokens cannot be divided evenly.
    """
    grid = pgm.process_group_manager
    _check_input_ids(batch, "")
    sequences, length = batch["input_ids"].shape
    parts, chunks = micro_batches * grid.dp_world_size, chunk_count(grid.cp_world_size, cp_sharding)
    if sequences % parts:
        raise UserError(
            f"{sequences} sequences cannot be divided into {micro_batches} micro-batches on each of {grid.dp_world_size} "
            f"data-parallel ranks; use a multiple of {parts}"
        )
    if length % chunks:
        raise UserError(
            f"{length} tokens cannot be divided into {chunks} chunks for {grid.cp_world_size} context-parallel ranks with "
            f"cp_sharding={cp_sharding!r}; use a multiple of {chunks}"
        )
    for name, value in batch.items():
        if name != "cu_seqlens" and isinstance(value, Tensor) and value.ndim and len(value) != sequences:
            raise UserError(f"{name} has {len(value)} sequences, but input_ids {sequences}; make them equal")
    _check_mask(batch.get("attention_mask"), "")
    return sequences // parts
