"""Tensor files of a checkpoint: one file per pp rank and kind of tensor, written by the tp ranks together.

Only the tp groups of dp rank 0 and cp rank 0 write, because the others hold replicas. (With ZeRO, the others hold
slices and send them to these groups, one tensor after the other. With expert parallelism, the first tp group that holds
an expert writes it, so there is one file per pp rank and ep rank.) tp rank 0 writes replicated tensors. Each rank
writes some rows of every sharded tensor: if the tensor is sharded by rows, these are the rank's shard; if it is
sharded by columns, an all-to-all turns the rank's columns of all rows into all columns of some rows. So no rank
assembles the full tensor in memory:

    rank 0 | rank 1        rank 0   0 0 0 0
     0 0   |  1 1     ->            0 0 0 0         a block of rows is one byte range of the file
     0 0   |  1 1          rank 1   1 1 1 1
     0 0   |  1 1                   1 1 1 1
     0 0   |  1 1
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.model.llama import Llama
from picotron.model.placement import OwnedSlice, Shard, owned_weight, placement, replicas
from picotron.optimizer import AdamW
from picotron.process_group_manager import new_groups
from workbench.run.checkpoint.safetensors_folder import ByteRange, plan_file, write_file


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """This rank's shard of a tensor, or its replica.

    Attributes:
        kind: model, exp_avg, exp_avg_sq or master.
        tensor: the shard or replica, or with ZeRO the elements of it that this rank owns.
        shape: shape of the shard or replica.
        shard: description of the shard, None for a replicated tensor.
        owned: description of the elements, None without ZeRO.
        ranks: the data-parallel ranks that hold the same shard or replica, or its elements; the first one writes it.
    """

    kind: str
    name: str
    tensor: Tensor
    shape: torch.Size
    shard: Shard | None
    owned: OwnedSlice | None
    ranks: list[int]

    @property
    def is_mine(self) -> bool:
        return self.ranks[0] == pgm.process_group_manager.global_rank

    @property
    def full_shape(self) -> torch.Size:
        return self.shape if self.shard is None else self.shard.full_shape(self.shape)


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """Byte ranges of a file that a rank has written, and the full size in bytes of each tensor in the file."""

    kind: str
    file: str
    ranges: list[ByteRange]
    sizes: dict[str, int]


class StageFiles:
    """Writer of the files of this pp rank.

    Args:
        llama: this rank's part of the model.
        optimizer: optimizer of its parameters.
        ep_size: number of ranks over which experts are split.
        world: all ranks, for data on the CPU; no other thread may use this group meanwhile.
    """

    def __init__(self, llama: Llama, optimizer: AdamW, ep_size: int, world: dist.ProcessGroup) -> None:
        grid = pgm.process_group_manager
        self.llama, self.optimizer, self.ep_size, self.world = llama, optimizer, ep_size, world
        # A separate group, because a background thread may call collectives during training; gloo for data on the CPU.
        self.group = new_groups(grid.grid.view(-1, grid.tp_world_size).tolist(), "gloo")

    def slices(self) -> list[TensorSlice]:
        """List the slices that this rank writes or sends, those of a kind one after the other."""
        slices: dict[str, list[TensorSlice]] = defaultdict(list)
        for name, parameter in self.llama.named_parameters():
            place = placement(parameter)
            ranks = dist.get_process_group_ranks(replicas(parameter))
            if not place.is_replica and (ranks[0] == pgm.process_group_manager.global_rank or place.owned):
                known = parameter.shape, place.shard, place.owned, ranks
                for kind, tensor in {"model": owned_weight(parameter), **self.optimizer.state_of(parameter)}.items():
                    slices[kind].append(TensorSlice(kind, name, tensor.detach(), *known))
        return [each for of_kind in slices.values() for each in of_kind]

    def write(self, folder: Path, slices: list[TensorSlice]) -> list[WrittenFile]:
        """Write this rank's rows of all tensors. All ranks of its tp group must call this; with ZeRO, those of its
        cp_dp group, too.
        """
        grid, written, error = pgm.process_group_manager, list[WrittenFile](), None
        number, count = grid.pp_rank * self.ep_size + grid.cp_dp_rank + 1, grid.pp_world_size * self.ep_size
        suffix = f"-{number:05d}-of-{count:05d}.safetensors" if count > 1 else ".safetensors"
        for kind, of_kind in itertools.groupby(slices, lambda each: each.kind):
            tensors = list(of_kind)
            mine = [each for each in tensors if each.is_mine]
            if not mine:
                for each in tensors:
                    self.gather(each)
                continue
            try:
                ranges = write_file(folder / (kind + suffix), self.parts(tensors))
            except OSError as failure:  # raised below: other ranks still wait for this one
                error = failure
                continue
            sizes = {each.name: each.full_shape.numel() * each.tensor.dtype.itemsize for each in mine}
            written.append(WrittenFile(kind, kind + suffix, ranges, sizes))
        if error is not None:
            raise error
        return written

    def parts(self, tensors: list[TensorSlice]) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield the parts of a file that this rank writes, each with its offset. The file has those of these tensors
        that are its own; slices of the others go to their writers, in the order in which these expect them.
        """
        mine = [each for each in tensors if each.is_mine]
        header, starts = plan_file({each.name: (each.tensor.dtype, each.full_shape) for each in mine})
        if pgm.process_group_manager.tp_rank == 0:
            yield 0, header
        for each in tensors:
            local = self.gather(each)
            if not each.is_mine:
                continue
            first, rows = self.rows_to_write(local, each.shard)
            if len(rows):
                data = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)  # (rows, bytes of a row)
                yield starts[each.name] + first * data.size(1), data.flatten().numpy().data

    def gather(self, tensor_slice: TensorSlice) -> Tensor:
        """Return this rank's shard or replica of a tensor. With ZeRO, its writer receives it from the ranks that own
        slices of it, and the others return their slice.
        """
        ranks, owned, own = tensor_slice.ranks, tensor_slice.owned, tensor_slice.tensor.cpu()
        if owned is None:
            return own
        if owned.rank > 0:
            if len(own):
                dist.send(own.view(torch.uint8), ranks[0], self.world)
            return own
        local = own.new_empty(owned.numel)
        for number, rank in enumerate(ranks):
            first, last = owned.bounds(number)
            if number == 0:
                local[first:last] = own
            elif first < last:
                dist.recv(local[first:last].view(torch.uint8), rank, self.world)
        return local.view(tensor_slice.shape)

    def rows_to_write(self, local: Tensor, shard: Shard | None) -> tuple[int, Tensor]:
        """Return the number of the first row that this rank writes of a tensor, and the rows.

        Args:
            local: this rank's shard or replica of the tensor, on the CPU.
        """
        grid = pgm.process_group_manager
        if shard is None:
            return 0, local[: len(local) if grid.tp_rank == 0 else 0]
        if shard.dim == 0:
            is_first = grid.tp_rank % shard.replicas == 0  # of the ranks that hold this shard
            return shard.start, local[: shard.stop - shard.start if is_first else 0]
        blocks = local.tensor_split(grid.tp_world_size)
        received = local.new_empty(grid.tp_world_size, *blocks[grid.tp_rank].shape)  # (tp, rows, columns/tp)
        lengths = [len(block) for block in blocks]
        dist.all_to_all_single(
            received.flatten(0, 1).view(torch.uint8),
            local.contiguous().view(torch.uint8),
            [lengths[grid.tp_rank]] * grid.tp_world_size,
            lengths,
            group=self.group,
        )
        return sum(lengths[: grid.tp_rank]), received.transpose(0, 1).flatten(1)
