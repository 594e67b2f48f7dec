"""Checks of users' batches before a step starts. Every rank raises the same error."""

import hashlib
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.collectives import run_on_all_ranks
from picotron.console import UserError
from picotron.context_parallel.positions import chunk_count, local_positions
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.cross_entropy import IGNORE_INDEX
from picotron.model.llama import Llama
from picotron.model.model_config import check_window
from picotron.parallelize import unwrap
from workbench.pipelines.modules import sequence_shards

Batch = dict[str, Any]
LossParts = tuple[Tensor, Tensor | float, dict[str, Tensor | float]]  # loss, weight and statistics of a micro-batch
PER_TOKEN = ("target_ids", "position_ids", "target_weights")  # tensors of the shape of `input_ids`
SHARED = ("input_ids", *PER_TOKEN, "cu_seqlens")  # tensors that must be equal on all ranks of a pipeline


class RankBatches(NamedTuple):
    """Facts about a rank's micro-batches that the other ranks check."""

    place: tuple[int, int]  # dp and cp rank: ranks at the same place process the same tokens
    ignores: bool  # whether a target is IGNORE_INDEX
    sizes: set[int]  # numbers of tokens of its micro-batches
    digests: list[dict[str, str]]  # of the shared tensors of each micro-batch, by name
    has_outputs: bool  # whether the step collects outputs, for which ranks may communicate


def check_batches(
    model: DataParallel, batches: Sequence[Batch], is_training: bool = False, has_outputs: bool = False
) -> bool:
    """Check micro-batches before a step.

    Args:
        is_training: whether the step runs backward, so that there must be no gradients yet.
        has_outputs: whether `train_batch` got a list for outputs.

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
        return _check_rank(unwrap(model), batches, has_outputs)

    everyone = run_on_all_ranks(check)
    first_at: dict[tuple[int, int], tuple[int, list[dict[str, str]]]] = {}
    for rank, (place, _, _, digests, outputs) in enumerate(everyone):
        if len(digests) != (count := len(everyone[0].digests)):
            raise UserError(
                f"rank 0 has {count} micro-batches, but rank {rank} has {len(digests)}; pass the same number on all ranks"
            )
        if ("target_weights" in digests[0]) != ("target_weights" in everyone[0].digests[0]):
            raise UserError(f"only one of the ranks 0 and {rank} has target_weights; add them on all ranks or on none")
        if outputs != everyone[0].has_outputs:
            raise UserError(
                f"only one of the ranks 0 and {rank} has a list of outputs; pass one on all ranks or on none"
            )
        first, expected = first_at.setdefault(place, (rank, digests))
        for i, (mine, theirs) in enumerate(zip(digests, expected, strict=True)):
            if different := [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]:
                raise UserError(
                    f"{min(different)} of micro-batch {i} differ between ranks {first} and {rank}, which process the same "
                    f"tokens; pass the same micro-batches to all pipeline and tensor-parallel ranks"
                )
    return any(each.ignores for each in everyone) or len(set().union(*(each.sizes for each in everyone))) > 1


def _check_parameters(model: DataParallel) -> None:
    """Check that no parameter was frozen in an earlier step, and that all gradients are 0. Those of an earlier step are
    sums over ranks, which are taken once.
    """
    parameters = unwrap(model).named_parameters()
    if late := [name for name, p in parameters if p.requires_grad and p not in model.trained]:
        raise UserError(
            f"{late[0]} requires a gradient, but was frozen before; unfreeze it before the model is wrapped and the "
            f"optimizer is made"
        )
    gradients = model.gradient_buffers()
    if gradients and torch.stack([gradient.any() for gradient in gradients]).any():
        raise UserError(
            "the gradients of an earlier train_batch are still there; call update_weights or optimizer.zero_grad before the "
            "next one, or pass all micro-batches to one train_batch"
        )


def _check_rank(llama: Llama, batches: Sequence[Batch], has_outputs: bool) -> RankBatches:
    """Check this rank's micro-batches."""
    if not isinstance(batches, Sequence):
        raise UserError(f"the micro-batches are a {type(batches).__name__}; pass a list of dicts, see split_batch")
    if not batches:
        raise UserError("there are no micro-batches; pass at least one")
    ignores = False
    for i, batch in enumerate(batches):
        if not isinstance(batch, dict):
            raise UserError(f"micro-batch {i} is a {type(batch).__name__}; pass a dict of tensors, see split_batch")
        if missing := [name for name in ("input_ids", "position_ids") if not isinstance(batch.get(name), Tensor)]:
            raise UserError(f"micro-batch {i} has no tensor {missing[0]!r}; add one, or use split_batch")
        shape = list(batch["input_ids"].shape)
        if len(shape) != 2 or 0 in shape:
            raise UserError(
                f"micro-batch {i}: input_ids have shape {shape}, but they must be (B, T); give them two dimensions, "
                "neither of which is 0"
            )
        for name in PER_TOKEN:
            _check_tensor(batch, name, f"micro-batch {i}: ")
            if name in batch and list(batch[name].shape) != shape:
                found = list(batch[name].shape)
                raise UserError(f"micro-batch {i}: {name} have shape {found}, but input_ids {shape}; make them equal")
        _check_mask(batch, f"micro-batch {i}: ")
        if batch.get("cu_seqlens") is not None:
            _check_boundaries(batch["cu_seqlens"], shape[0], shape[1], f"micro-batch {i}: ")
        if ("target_weights" in batch) != ("target_weights" in batches[0]):
            raise UserError(f"only one of the micro-batches 0 and {i} has target_weights; add them to all or none")
        _check_ids(batch["input_ids"], "input_ids", llama.config.vocab_size, i)
        if not batch.get("target_weights", torch.ones(1)).isfinite().all():
            raise UserError(f"micro-batch {i}: target_weights have a NaN or an infinite number; correct them")
        if "target_ids" in batch:
            ignored = batch["target_ids"] == IGNORE_INDEX
            counted = ~ignored & (batch["target_weights"] != 0) if "target_weights" in batch else ~ignored
            _check_ids(batch["target_ids"][counted], "target_ids", llama.config.vocab_size, i)
            ignores |= bool(ignored.any())
    _check_lengths(llama, batches)
    _check_sharding(llama, batches)
    grid = pgm.process_group_manager
    digests = [
        {name: _digest(batch[name]) for name in SHARED if isinstance(batch.get(name), Tensor)} for batch in batches
    ]
    sizes = {batch["input_ids"].numel() for batch in batches}
    return RankBatches((grid.dp_rank, grid.cp_rank), ignores, sizes, digests, has_outputs)


def _check_tensor(batch: Batch, name: str, where: str) -> None:
    if name in batch and not isinstance(batch[name], Tensor):
        raise UserError(
            f"{where}{name} are a {type(batch[name]).__name__}, not a tensor; convert them with torch.tensor"
        )


def _check_mask(batch: Batch, where: str) -> None:
    """Check that an attention mask hides only padding at the end of rows, which causal attention never sees."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and (mask.long().diff(dim=1) > 0).any():
        raise UserError(
            f"{where}attention_mask hides tokens before others, but attention here is causal and has no mask; pad rows on "
            f"the right, or use pack_sequences"
        )


def _check_sharding(llama: Llama, batches: Sequence[Batch]) -> None:
    """Check that no positions are those of the other sharding. (A program may have positions of its own.)"""
    sharding: Any = next((each.cp_sharding for each in llama.modules() if hasattr(each, "cp_sharding")), None)
    if sharding is None:  # cp_size is 1, or this rank has no layers
        return
    other = "contiguous" if sharding == "zigzag" else "zigzag"
    for i, batch in enumerate(batches):
        positions, rows = batch["position_ids"].cpu().long(), batch | {"cu_seqlens": None}
        right, wrong = (  # positions count from the beginning of a document, or of a row
            any(_positions(each, kind).equal(positions) for each in (batch, rows)) for kind in (sharding, other)
        )
        if wrong and not right:
            raise UserError(
                f"micro-batch {i} was split with cp_sharding={other!r}, but the config has {sharding!r}; pass "
                f"cp_sharding={sharding!r} to split_batch or pack_sequences"
            )


def _positions(batch: Batch, sharding: str) -> Tensor:
    """Return the positions of this rank's tokens in their documents, (B, T/cp), for a sharding."""
    grid, (B, tokens) = pgm.process_group_manager, batch["input_ids"].shape
    T = tokens * grid.cp_world_size
    if T % chunk_count(grid.cp_world_size, sharding):
        return torch.empty(0)
    places = T * torch.arange(B)[:, None] + local_positions(T, grid.cp_world_size, grid.cp_rank, sharding)
    starts = T * torch.arange(B + 1) if batch.get("cu_seqlens") is None else batch["cu_seqlens"].cpu().long()
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]


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


def _check_lengths(llama: Llama, batches: Sequence[Batch]) -> None:
    """Check the lengths for sequence parallelism and for the model's window."""
    grid, shards = pgm.process_group_manager, sequence_shards(llama)
    for i, batch in enumerate(batches):
        tokens = batch["input_ids"].size(1)
        if tokens % shards:
            raise UserError(
                f"micro-batch {i} has {tokens} tokens per sequence on a context-parallel rank, which sequence parallelism cannot "
                f"divide over {shards} tensor-parallel ranks; use a multiple of {shards}"
            )
        boundaries = batch.get("cu_seqlens")
        length = tokens * grid.cp_world_size if boundaries is None else int(boundaries.diff().max())
        check_window(llama.config, length, f"micro-batch {i}: a sequence of {length} tokens")


def _check_boundaries(cu_seqlens: Tensor, sequences: int, tokens: int, where: str) -> None:
    """Check the boundaries of documents, of which a context-parallel rank has a part of the tokens."""
    length = tokens * pgm.process_group_manager.cp_world_size
    _check_tensor({"cu_seqlens": cu_seqlens}, "cu_seqlens", where)
    boundaries = cu_seqlens.tolist()
    if cu_seqlens.ndim != 1:
        raise UserError(f"{where}cu_seqlens have shape {list(cu_seqlens.shape)}; give them one dimension")
    if cu_seqlens.is_floating_point():
        raise UserError(
            f"{where}cu_seqlens have dtype {cu_seqlens.dtype}, but they are integers; convert them to torch.int32"
        )
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
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        found = f"of shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise UserError(f"input_ids should be a tensor (G, T) of G sequences, not {found}; stack the sequences")
    sequences, length = ids.shape
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
    _check_mask(batch, "")
    if batch.get("cu_seqlens") is not None:
        _check_boundaries(batch["cu_seqlens"], sequences, length // grid.cp_world_size, "")
    return sequences // parts


def check_loss(returned: Any) -> LossParts:
    """Check the result of a `loss_fn`. Returns the loss with its gradient, and the rest without.

    Raises:
        UserError: the result is neither a loss nor (loss, weight, statistics), or one of them is not a scalar.
    """
    if isinstance(returned, tuple) and not (len(returned) == 3 and isinstance(returned[2], dict)):
        raise UserError(
            f"loss_fn returned a tuple of {len(returned)}, but it must return a loss, or (loss, weight, statistics) with a "
            f"dict of statistics"
        )
    loss, weight, statistics = returned if isinstance(returned, tuple) else (returned, 1.0, {})
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        found = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"as a {type(loss).__name__}"
        raise UserError(
            f"loss_fn returned a loss {found}, but it must be a scalar tensor; sum the losses of the tokens"
        )
    if not loss.requires_grad:
        raise UserError(
            "loss_fn returned a loss without a gradient; unfreeze a parameter, or compute the loss from x without detach"
        )
    if names := [name for name in statistics if not isinstance(name, str)]:
        raise UserError(f"loss_fn returned a statistic whose name is {names[0]!r}; use a string")
    named = {"a weight": weight} | {f"the statistic {name!r}": each for name, each in statistics.items()}
    for name, value in named.items():
        if not isinstance(value, numbers.Real) and not (isinstance(value, Tensor) and value.ndim == 0):
            found = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
            raise UserError(f"loss_fn returned {name} {found}, but it must be a number or a scalar tensor; sum it")
    detached = {name: each.detach() if isinstance(each, Tensor) else each for name, each in statistics.items()}
    return loss, weight.detach() if isinstance(weight, Tensor) else weight, detached
