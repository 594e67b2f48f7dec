"""How a rank's parts of the weights get their values: from a checkpoint, or drawn."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron.model.families import differences
from picotron.model.llama import Llama
from picotron.model.placement import Index, Shard, owned_weight, place, placement

TILE = 256  # rows and columns of a matrix that are drawn at a time
ALL = slice(None)

ReadTensor = Callable[[str, torch.Size, Index], Tensor]
"""`read(name, shape, index)` returns the slice `[index]` of the parameter `name`, whose full shape is `shape`"""


def copy_shard(tensor: Tensor, name: str, shard: Shard | None, read: ReadTensor) -> None:
    """Copy this rank's shard of a parameter, or of the optimizer's state for it, into `tensor`. Padding becomes 0."""
    if shard is None:
        tensor.copy_(read(name, tensor.shape, ()))
    else:
        values = read(name, shard.full_shape(tensor.shape), shard.index)
        held = shard.stop - shard.start
        tensor.narrow(shard.dim, 0, held).copy_(values)
        tensor.narrow(shard.dim, held, shard.size - held).zero_()


def copy_owned(tensor: Tensor, parameter: nn.Parameter, name: str, read: ReadTensor) -> None:
    """Copy the elements of a parameter that this rank owns, or the optimizer's state for them, into `tensor`, as in
    `copy_shard`. Reads no rows without such elements.
    """
    shard, owned = placement(parameter).shard, placement(parameter).owned
    if owned is None:
        return copy_shard(tensor, name, shard, read)
    if tensor.numel() == 0:
        return None
    first, last = owned.bounds(owned.rank)
    columns = parameter.shape[1:].numel()
    rows = slice(first // columns, -(-last // columns))
    values = tensor.new_zeros(rows.stop - rows.start, *parameter.shape[1:])
    if shard is not None and shard.dim == 0:
        start, stop = (min(shard.start + row, shard.stop) for row in (rows.start, rows.stop))
        if start < stop:  # there are rows that are not padding
            copy_shard(values, name, dataclasses.replace(shard, start=start, stop=stop, size=len(values)), read)
    else:

        def read_rows(name: str, shape: torch.Size, index: Index) -> Tensor:
            return read(name, torch.Size([len(parameter), *shape[1:]]), (rows, *index[1:]))

        copy_shard(values, name, shard, read_rows)
    tensor.copy_(values.flatten()[first - rows.start * columns :][: last - first])
    return None


def read_owned_weights(model: nn.Module, read: ReadTensor) -> None:
    """Fill the `owned_weight` of each parameter with what `read` returns."""
    for name, parameter in model.named_parameters():
        copy_owned(owned_weight(parameter), parameter, name, read)


def materialise(model: Llama, device: torch.device, read: ReadTensor | None) -> None:
    """Allocate the parameters of a model on the meta device, and fill them with what `read` returns.

    Args:
        read: None leaves the parameters without memory.
    """
    for name, parameter in list(model.named_parameters()):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if read is None:
            values.untyped_storage().resize_(0)
        else:
            copy_shard(values, name, placement(parameter).shard, read)
        owner, _, leaf = name.rpartition(".")
        allocated = nn.Parameter(values)
        place(allocated, **vars(placement(parameter)))
        setattr(model.get_submodule(owner), leaf, allocated)
    model.tie_weights()


def initial_weights(config: PreTrainedConfig, seed: int) -> ReadTensor:
    """Return a reader of initial weights with transformers' distribution: normal with standard deviation
    `initializer_range`; biases are 0, and norms multiply by 1.

    A matrix consists of tiles of TILE rows and columns. Each tile has its own CPU generator, seeded by (seed, name,
    number of the tile), and a rank draws only the tiles that its shard overlaps. So the numbers do not depend on the
    layout.
    """
    padding = None if config.pad_token_id is None else config.pad_token_id % config.vocab_size  # -1: the last row

    def draw(name: str, shape: torch.Size, index: Index) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - differences(config).norm_offset)[index]
        if name.endswith(".bias"):
            return torch.zeros(shape)[index]
        (first_row, last_row, _), (first_column, last_column, _) = (
            each.indices(size) for each, size in zip((*index, ALL, ALL), shape, strict=False)
        )
        top, left = first_row // TILE * TILE, first_column // TILE * TILE
        bottom, right = (
            min(-(-last // TILE) * TILE, size) for last, size in zip((last_row, last_column), shape, strict=True)
        )
        weight = torch.empty(bottom - top, right - left)
        seed_of_name = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")
        for i, j in itertools.product(range(top, bottom, TILE), range(left, right, TILE)):
            tile = weight[i - top : i - top + TILE, j - left : j - left + TILE]
            # torch's CPU generators use 32 bits of a seed. Consecutive seeds make the tiles of a matrix differ.
            number = i // TILE * -(-shape[1] // TILE) + j // TILE
            generator = torch.Generator().manual_seed((seed_of_name + number) % 2**32)
            tile.copy_(torch.normal(0.0, config.initializer_range, tile.shape, generator=generator))
        if name.endswith("embed_tokens.weight") and padding is not None and top <= padding < bottom:
            weight[padding - top] = 0.0  # the padding token's embedding is 0 and gets no gradient
        return weight[first_row - top : last_row - top, first_column - left : last_column - left]

    return draw
