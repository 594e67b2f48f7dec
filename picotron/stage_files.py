"""The tensors of a checkpoint: a file per pipeline stage and kind of tensor, written by the stage's tp ranks together.

Of each stage the tp group of dp rank 0 and cp rank 0 writes; the others hold the same. Its ranks share the bytes of the
files among them. Tensor by tensor, the one that writes it gathers the parts of it from the others, so none ever has
more than one whole tensor in memory.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.model import Llama
from picotron.optimizer import AdamW
from picotron.process_group_manager import new_groups
from picotron.safetensors_folder import Part, PartWriter, plan_file
from picotron.utils import together
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
    """What a rank has written of a file, and the bytes of each tensor in it."""

    kind: str
    file: str
    part: Part
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
        mine = {name: (shard.start, shard.stop) for name, _, shard in parameters_and_shards(llama) if shard}
        self.ranges = together(lambda: mine, self.group)  # of each tp rank

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
        """Write this rank's share of its stage's files, about as many bytes as the other tp ranks."""
        tp_rank, tp_size = pgm.process_group_manager.tp_rank, pgm.process_group_manager.tp_world_size
        total, done = sum(piece.size for piece in pieces), 0
        shares: list[list[Piece]] = [[] for _ in range(tp_size)]
        for piece in pieces:
            shares[done * tp_size // total].append(piece)
            done += piece.size
        writers: dict[str, PartWriter] = {}
        for row in itertools.zip_longest(*shares):  # a piece for each of the ranks, so that they write at the same time
            gathers = [(piece, self._start_gather(piece, rank)) for rank, piece in enumerate(row) if piece is not None]
            for piece, finish in gathers:
                if (tensor := finish()) is not None:
                    if piece.file not in writers:
                        writers[piece.file] = PartWriter(folder / piece.file, piece.start - len(piece.header))
                    writers[piece.file].write(piece.header)
                    writers[piece.file].write(tensor.view(torch.uint8).flatten().numpy().data)
        sizes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for piece in shares[tp_rank]:
            sizes[piece.kind, piece.file][piece.name] = piece.size
        return [Written(kind, file, writers[file].close(), held) for (kind, file), held in sizes.items()]

    def _start_gather(self, piece: Piece, writer: int) -> Callable[[], Tensor | None]:
        """Begin to send the parts of a tensor to the tp rank `writer`. The returned function waits, and returns the
        whole tensor there, elsewhere None.
        """
        grid, mine, shard = pgm.process_group_manager, piece.tensor.cpu().contiguous(), piece.shard
        if shard is None or grid.tp_world_size == 1:
            return lambda: mine if writer == grid.tp_rank else None
        parts = [torch.empty_like(mine) for _ in range(grid.tp_world_size)] if writer == grid.tp_rank else []
        received = [part.view(torch.uint8) for part in parts] or None
        work = dist.gather(mine.view(torch.uint8), received, group=self.group, group_dst=writer, async_op=True)

        def finish() -> Tensor | None:
            work.wait()
            # By their start: key/value heads that several ranks hold count once. What is beyond the stop is padding.
            by_start = {}
            for part, ranges in zip(parts, self.ranges, strict=False):
                start, stop = ranges[piece.name]
                by_start[start] = part.narrow(shard.dim, 0, stop - start)
            return torch.cat(list(by_start.values()), shard.dim) if parts else None

        return finish
