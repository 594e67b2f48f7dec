"""Tensor files of a checkpoint: one file per pp rank and kind of tensor, written by the tp ranks together.

Only the tp groups of dp rank 0 and cp rank 0 write, because the others hold replicas. (With ZeRO, the others hold
slices and send them to these groups, one tensor after the other.) tp rank 0 writes replicated tensors. Each rank
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
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.checkpoint.safetensors_folder import ByteRange, FileWriter, plan_file
from picotron.model.llama import Llama
from picotron.model.placement import OwnedSlice, Shard, owned_weight, placement
from picotron.optimizer import AdamW
from picotron.process_group_manager import new_groups


def full_shape(local: torch.Size, shard: Shard | None) -> torch.Size:
    """Return the shape of the full tensor of a shard or replica."""
    return local if shard is None else shard.full_shape(local)


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """This rank's shard of a tensor, or its replica, and the place of the full tensor in a file.

    Attributes:
        tensor: the shard or replica, or with ZeRO the elements of it that this rank owns.
        shape: shape of the shard or replica.
        owned: description of these elements, None without ZeRO.
        kind: model, exp_avg, exp_avg_sq or master.
        start: offset of the full tensor in the file, in bytes.
        header: for the first tensor of the file, the bytes before this tensor, else empty.
        shard: description of the shard, None for a replicated tensor.
        updates: number of optimizer updates of the parameter.
    """

    kind: str
    file: str
    name: str
    start: int
    header: bytes
    tensor: Tensor
    shape: torch.Size
    shard: Shard | None
    owned: OwnedSlice | None
    updates: int

    @property
    def size(self) -> int:
        """Size of the full tensor in bytes."""
        return full_shape(self.shape, self.shard).numel() * self.tensor.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """Byte ranges of a file that a rank has written, and for each tensor in the file, its full size in bytes and the
    number of updates of its parameter.
    """

    kind: str
    file: str
    ranges: list[ByteRange]
    sizes: dict[str, int]
    updates: dict[str, int]


class StageFiles:
    """Writer of the files of this pp rank.

    Args:
        llama: this rank's part of the model.
        optimizer: optimizer of its parameters.
        world: all ranks, for data on the CPU; no other thread may use this group meanwhile. None: the default group.
    """

    def __init__(self, llama: Llama, optimizer: AdamW, world: dist.ProcessGroup | None = None) -> None:
        grid = pgm.process_group_manager
        self.llama, self.optimizer, self.world = llama, optimizer, world
        # A separate group, because a background thread may call collectives during training; gloo for data on the CPU.
        self.group = new_groups(grid.grid.view(-1, grid.tp_world_size).tolist(), "gloo")

    def slices(self) -> list[TensorSlice]:
        """List the slices of all files that this rank writes or sends, in the order of the files."""
        grid, updates = pgm.process_group_manager, self.optimizer.updates()
        tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)
        places: dict[str, tuple[torch.Size, Shard | None, OwnedSlice | None, int]] = {}
        for name, parameter in self.llama.named_parameters():
            place = placement(parameter)
            if not place.is_replica and (grid.cp_dp_rank == 0 or place.owned):
                places[name] = parameter.shape, place.shard, place.owned, updates.get(parameter, 0)
                for kind, tensor in {"model": owned_weight(parameter), **self.optimizer.state_of(parameter)}.items():
                    tensors[kind][name] = tensor.detach()
        number, count = grid.pp_rank + 1, grid.pp_world_size
        suffix = f"-{number:05d}-of-{count:05d}.safetensors" if count > 1 else ".safetensors"
        slices = []
        for kind, group in tensors.items():
            header, starts = plan_file({name: (t.dtype, full_shape(*places[name][:2])) for name, t in group.items()})
            for name, tensor in group.items():
                slices.append(TensorSlice(kind, kind + suffix, name, starts[name], header, tensor, *places[name]))
                header = b""
        return slices

    def write(self, folder: Path, slices: list[TensorSlice]) -> list[WrittenFile]:
        """Write this rank's rows of all tensors. All ranks of its tp group must call this; with ZeRO, those of its
        cp_dp group, too.
        """
        writers: dict[str, FileWriter] = {}
        tensors: dict[tuple[str, str], list[TensorSlice]] = defaultdict(list)
        for each in slices:
            local = self.gather(each)
            if local is None:
                continue
            if each.file not in writers:
                writers[each.file] = FileWriter(folder / each.file)
            writer, (first, rows) = writers[each.file], self.rows_to_write(local, each.shard)
            if each.header and pgm.process_group_manager.tp_rank == 0:
                writer.write(0, each.header)
            if len(rows):
                data = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)  # (rows, bytes of a row)
                writer.write(each.start + first * data.size(1), data.flatten().numpy().data)
            tensors[each.kind, each.file].append(each)
        return [
            WrittenFile(
                kind,
                file,
                writers[file].close(),
                sizes={each.name: each.size for each in of_file},
                updates={each.name: each.updates for each in of_file},
            )
            for (kind, file), of_file in tensors.items()
        ]

    def gather(self, tensor_slice: TensorSlice) -> Tensor | None:
        """Return this rank's shard or replica of a tensor. With ZeRO, cp_dp rank 0 receives it from the ranks that own
        slices of it, and the others return None.
        """
        ranks = pgm.process_group_manager.cp_dp_group_ids
        owned, own = tensor_slice.owned, tensor_slice.tensor.cpu()
        if owned is None:
            return own
        if owned.rank > 0:
            if len(own):
                dist.send(own.view(torch.uint8), ranks[0], self.world)
            return None
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
