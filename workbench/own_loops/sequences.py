"""Batches by sequence: sequences of any lengths, packed into micro-batches with about the same number of tokens.

    packed = pack_sequences([{"input_ids": ids, "target_ids": targets}, ...], max_tokens=4096)
    result = train_batch(step, model, packed.batches)
    log_probs = packed.unpack(forward_batch(evaluate, model, packed.batches, log_probs_of, merge=list))

A micro-batch is one row, in which each sequence is a document, so that it attends only to itself.
"""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.context_parallel.context_parallel import chunk_count, local_positions
from picotron.model.cross_entropy import IGNORE_INDEX
from workbench.own_loops.batches import micro_batches_or_default
from workbench.own_loops.check_batches import Batch


class PackedSequences(NamedTuple):
    """This rank's micro-batches, and what they hold.

    Attributes:
        batches: micro-batches for `train_batch` and `forward_batch`, with input_ids (1, T/cp). They also have
            `sequences`, the numbers of their sequences.
        lengths: number of tokens of each of all sequences.
        cp_sharding: see `local_positions`.
    """

    batches: list[Batch]
    lengths: list[int]
    cp_sharding: str

    def unpack(self, outputs: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Return the outputs of each sequence, (its length, ...), in the order in which the sequences were given.

        All ranks must call this. The results are the same on all ranks with the last stage; on the others None.

        Args:
            outputs: outputs (1, T/cp, ...) of each micro-batch on ranks with the last stage; None on the others.
        """
        if outputs is None:
            return None
        grid = pgm.process_group_manager
        found: dict[int, Tensor] = {}
        for batch, output in zip(self.batches, outputs, strict=True):
            shards = [torch.empty_like(output) for _ in range(grid.cp_world_size)]
            dist.all_gather(shards, output.contiguous(), group=grid.cp_group)
            T = grid.cp_world_size * output.size(1)
            row = output.new_empty(T, *output.shape[2:])
            for rank, shard in enumerate(shards):
                row[local_positions(T, grid.cp_world_size, rank, self.cp_sharding).to(row.device)] = shard[0]
            lengths = [self.lengths[number] for number in batch["sequences"]]
            parts = row[: sum(lengths)].split(lengths)
            # copies, because a view is sent with all of its row
            found |= {number: part.clone().cpu() for number, part in zip(batch["sequences"], parts, strict=True)}
        everywhere: list[Any] = [None] * grid.dp_world_size
        dist.all_gather_object(everywhere, found, group=grid.dp_group)
        merged = {number: part for each in everywhere for number, part in each.items()}
        return [merged[number].to(outputs[0].device) for number in range(len(self.lengths))]


def pack_sequences(
    sequences: Sequence[Batch],
    micro_batches: int | None = None,
    max_tokens: int | None = None,
    cp_sharding: str = "zigzag",
) -> PackedSequences:
    """Distribute sequences, which every rank has, over the dp ranks and micro-batches: the longest ones first, each to
    the micro-batch with the fewest tokens (Graham 1969).

    Args:
        sequences: a dict for each, with `input_ids` (T,). Other tensors that begin with T in all of them are also
            packed; anything else is collected in a list. Without `target_weights`, all targets but those that are
            IGNORE_INDEX weigh 1.
        micro_batches: number of micro-batches on each dp rank, see `micro_batches_or_default`.
        max_tokens: number of tokens that a micro-batch may have, before padding. There are more micro-batches if it is
            exceeded, some of which may have padding only: all dp ranks need the same number.
        cp_sharding: see `local_positions`.

    Raises:
        UserError: there are fewer sequences than micro-batches, one of them is empty, longer than `max_tokens` or no
            tensor, or they have different keys.
    """
    grid, lengths = pgm.process_group_manager, [len(each.get("input_ids", ())) for each in sequences]
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        if length == 0:
            raise UserError(f"sequence {i} has no tokens in input_ids; leave it out")
        if not isinstance(sequence["input_ids"], Tensor):
            raise UserError(f"input_ids of sequence {i} is a {type(sequence['input_ids']).__name__}; pass a tensor")
        if max_tokens is not None and length > max_tokens:
            raise UserError(f"sequence {i} has {length} tokens, but max_tokens={max_tokens}; use a larger max_tokens")
        if different := sequence.keys() ^ sequences[0].keys():
            raise UserError(f"only one of the sequences 0 and {i} has {min(different)}; give it to all or none")
    count = micro_batches_or_default(micro_batches) * grid.dp_world_size
    if len(sequences) < count:
        raise UserError(
            f"{len(lengths)} sequences cannot fill {count} micro-batches on all data-parallel ranks; use fewer micro-batches, "
            f"or more sequences"
        )
    if max_tokens is not None:  # fewer cannot hold all tokens
        count = max(count, -(-sum(lengths) // (max_tokens * grid.dp_world_size)) * grid.dp_world_size)
    bins = _balance(lengths, count)
    while max_tokens is not None and max(sum(lengths[i] for i in each) for each in bins) > max_tokens:
        count += grid.dp_world_size
        bins = _balance(lengths, count)
    per_token = [
        name
        for name in sequences[0]
        if all(isinstance(each[name], Tensor) and each[name].shape[:1] == each["input_ids"].shape for each in sequences)
    ]
    own = [_pack(sequences, each, per_token, cp_sharding) for each in bins[grid.dp_rank :: grid.dp_world_size]]
    return PackedSequences(own, lengths, cp_sharding)


def _balance(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the numbers of the sequences in each of `count` bins."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = heap[0]
        bins[number].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], number))
    return bins


def _pack(sequences: Sequence[Batch], numbers: list[int], per_token: Sequence[str], cp_sharding: str) -> Batch:
    """Return this rank's part of the micro-batch of some sequences: input_ids (1, T/cp), and so on.

    Args:
        per_token: names of the tensors that are packed.
    """
    grid, lengths = pgm.process_group_manager, [len(sequences[i]["input_ids"]) for i in numbers]
    multiple = chunk_count(grid.cp_world_size, cp_sharding) * grid.tp_world_size
    padding = -sum(lengths) % multiple if lengths else multiple
    documents = [*lengths, padding] if padding else lengths
    first = sequences[0]
    T, device = sum(documents), first["input_ids"].device
    positions = local_positions(T, grid.cp_world_size, grid.cp_rank, cp_sharding).to(device)
    packed: Batch = {"sequences": numbers, "cp_sharding": cp_sharding}
    packed["cu_seqlens"] = torch.tensor([0, *documents]).cumsum(0).int()
    rows = {"position_ids": torch.cat([torch.arange(length, device=device) for length in documents])}
    for name, value in first.items():
        values = [sequences[i][name] for i in numbers]
        if name in per_token:
            fill = IGNORE_INDEX if name == "target_ids" else 0
            rows[name] = torch.cat([*values, value.new_full((padding, *value.shape[1:]), fill)])
        else:
            packed[name] = values
    return packed | {name: row[None, positions] for name, row in rows.items()}
