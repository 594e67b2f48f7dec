"""The tensors of a checkpoint: a file per pipeline stage and kind of tensor, written by the stage's tp ranks together.

Of each stage the tp group of dp rank 0 and cp rank 0 writes; the others hold the same. Each of its ranks writes some
rows of every tensor. These are what a rank has, if the rows are what is split; if the columns are, an all-to-all turns
its columns of all rows into all columns of its rows. So no rank ever has a whole tensor in memory that is split:

    rank 0 | rank 1        rank 0   0 0 0 0
     0 0   |  1 1     ->            0 0 0 0         each row of a tensor is one run of bytes in its file
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
from picotron.model import Llama
from picotron.optimizer import AdamW
from picotron.process_group_manager import new_groups
from picotron.weights import Shard, is_tied_replica, parameters_and_shards


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """A tensor of a file: this rank's part of it, and where the whole begins in the file. The first one of a file also
    brings what stands before it, the header.
    """

    kind: str
    file: str
    name: str
    start: int
    header: bytes
    tensor: Tensor
    shard: Shard | None

    @property
    def size(self) -> int:
        shape = self.tensor.shape if self.shard is None else self.shard.full_shape(self.tensor.shape)
        return shape.numel() * self.tensor.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """What a rank has written of a file, and the size in bytes of each of its tensors."""

    kind: str
    file: str
    ranges: list[ByteRange]
    sizes: dict[str, int]


class StageFiles:
    """The files of this pipeline stage.

    Args:
        llama: this rank's part of the model.
        optimizer: of its parameters.
    """

    def __init__(self, llama: Llama, optimizer: AdamW) -> None:
        grid = pgm.process_group_manager
        self.llama, self.optimizer = llama, optimizer
        # On the CPU, whatever the device, and its own: messages may come from a thread beside training.
        self.group = new_groups(grid.grid.view(-1, grid.tp_world_size).tolist(), "gloo")

    def slices(self) -> list[TensorSlice]:
        """What the files hold, in their order."""
        grid = pgm.process_group_manager
        tensors: dict[str, dict[str, tuple[Tensor, Shard | None]]] = defaultdict(dict)
        for name, parameter, shard in parameters_and_shards(self.llama):
            if not is_tied_replica(self.llama, name):
                tensors["model"][name] = parameter.detach(), shard
                for kind, tensor in self.optimizer.state_of(parameter).items():
                    tensors[kind][name] = tensor.detach(), shard
        number, count = grid.pp_rank + 1, grid.pp_world_size
        suffix = f"-{number:05d}-of-{count:05d}.safetensors" if count > 1 else ".safetensors"
        slices = []
        for kind, held in tensors.items():
            shapes = {name: shard.full_shape(t.shape) if shard else t.shape for name, (t, shard) in held.items()}
            header, starts = plan_file({name: (held[name][0].dtype, shape) for name, shape in shapes.items()})
            for name, (tensor, shard) in held.items():
                slices.append(TensorSlice(kind, kind + suffix, name, starts[name], header, tensor, shard))
                header = b""
        return slices

    def write(self, folder: Path, slices: list[TensorSlice]) -> list[WrittenFile]:
        """Write this rank's rows of all slices. The ranks of its tp group have to call this together.

        Raises:
            OSError: not everything is on the disk.
        """
        writers: dict[str, FileWriter] = {}
        sizes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for part in slices:
            if part.file not in writers:
                writers[part.file] = FileWriter(folder / part.file)
            writer, (first, rows) = writers[part.file], self.rows_to_write(part)
            if part.header and pgm.process_group_manager.tp_rank == 0:
                writer.write(0, part.header)
            if len(rows):
                data = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)  # (rows, bytes of a row)
                writer.write(part.start + first * data.size(1), data.flatten().numpy().data)
            sizes[part.kind, part.file][part.name] = part.size
        return [WrittenFile(kind, file, writers[file].close(), held) for (kind, file), held in sizes.items()]

    def rows_to_write(self, part: TensorSlice) -> tuple[int, Tensor]:
        """The rows of a tensor that this rank writes, and the number of the first."""
        grid, shard, mine = pgm.process_group_manager, part.shard, part.tensor.cpu()
        if shard is None:
            return 0, mine[: len(mine) if grid.tp_rank == 0 else 0]
        if shard.dim == 0:
            is_first = grid.tp_rank % shard.replicas == 0  # of several ranks that hold the same rows
            return shard.start, mine[: shard.stop - shard.start if is_first else 0]
        blocks = mine.tensor_split(grid.tp_world_size)
        received = mine.new_empty(grid.tp_world_size, *blocks[grid.tp_rank].shape)  # (tp, rows, columns/tp)
        lengths = [len(block) for block in blocks]
        dist.all_to_all_single(
            received.flatten(0, 1).view(torch.uint8),
            mine.contiguous().view(torch.uint8),
            [lengths[grid.tp_rank]] * grid.tp_world_size,
            lengths,
            group=self.group,
        )
        return sum(lengths[: grid.tp_rank]), received.transpose(0, 1).flatten(1)
