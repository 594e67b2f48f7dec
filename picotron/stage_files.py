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
from picotron.model import Llama
from picotron.optimizer import AdamW
from picotron.process_group_manager import new_groups
from picotron.safetensors_folder import FileWriter, Part, plan_file
from picotron.weights import Shard, is_copy, parameters_and_shards


@dataclasses.dataclass(frozen=True)
class Piece:
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
class Written:
    """What a rank has written of a file, and the size in bytes of each of its tensors."""

    kind: str
    file: str
    parts: list[Part]
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

    def pieces(self) -> list[Piece]:
        """What the files hold, in their order."""
        grid = pgm.process_group_manager
        tensors: dict[str, dict[str, tuple[Tensor, Shard | None]]] = defaultdict(dict)
        for name, parameter, shard in parameters_and_shards(self.llama):
            if not is_copy(self.llama, name):
                tensors["model"][name] = parameter.detach(), shard
                for kind, tensor in self.optimizer.state_of(parameter).items():
                    tensors[kind][name] = tensor.detach(), shard
        number, count = grid.pp_rank + 1, grid.pp_world_size
        suffix = f"-{number:05d}-of-{count:05d}.safetensors" if count > 1 else ".safetensors"
        pieces = []
        for kind, held in tensors.items():
            shapes = {name: shard.full_shape(t.shape) if shard else t.shape for name, (t, shard) in held.items()}
            header, starts = plan_file({name: (held[name][0].dtype, shape) for name, shape in shapes.items()})
            for name, (tensor, shard) in held.items():
                pieces.append(Piece(kind, kind + suffix, name, starts[name], header, tensor, shard))
                header = b""
        return pieces

    def write(self, folder: Path, pieces: list[Piece]) -> list[Written]:
        """Write this rank's rows of all pieces. The ranks of its tp group have to call this together.

        Raises:
            OSError: not everything is on the disk.
        """
        writers: dict[str, FileWriter] = {}
        sizes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for piece in pieces:
            if piece.file not in writers:
                writers[piece.file] = FileWriter(folder / piece.file)
            writer, (first, rows) = writers[piece.file], self._rows(piece)
            if piece.header and pgm.process_group_manager.tp_rank == 0:
                writer.write(0, piece.header)
            if len(rows):
                data = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)  # (rows, bytes of a row)
                writer.write(piece.start + first * data.size(1), data.flatten().numpy().data)
            sizes[piece.kind, piece.file][piece.name] = piece.size
        return [Written(kind, file, writers[file].close(), held) for (kind, file), held in sizes.items()]

    def _rows(self, piece: Piece) -> tuple[int, Tensor]:
        """The rows of a tensor that this rank writes, and the number of the first."""
        grid, shard, mine = pgm.process_group_manager, piece.shard, piece.tensor.cpu()
        if shard is None:
            return 0, mine[: len(mine) if grid.tp_rank == 0 else 0]
        if shard.dim == 0:
            is_first = grid.tp_rank % shard.copies == 0  # of several ranks that hold the same rows
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
